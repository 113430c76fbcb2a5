"""The policies that are compared: who decides, which machines generate, and how weights travel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from rlboost.shared.messages import Message

Rule = Literal["rlboost", "paper", "polyrl"]
"""`rlboost`: the rollout manager's own domain code; `paper`: the paper's algorithms as printed; `polyrl`: the rule of
its released code."""
Fleet = Literal["spot", "none", "dedicated"]
"""Which instances generate besides the reserved engines: those of the trace, none, or a constant number of reserved
ones, in which case the reserved cluster only trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy, with switches for its parts."""

    name: str
    rule: Rule
    fleet: Fleet = "spot"
    nodes: int = 1
    """Factor of the reserved cluster."""
    weights: Literal["full", "delta"] = "full"
    bytes_factor: float = 1.0
    """Bytes that are sent for each byte of the bf16 model, where whole versions are sent."""
    peers: bool = False
    """Instances get weights from one another."""
    notices: bool = False
    """A preempted instance hands its samples off before its end."""
    speculation: bool = False
    """Engines draft from ended samples of the same prompt."""
    staleness: int = 0
    """How many versions old a sample's weights may be (`elastic.max_staleness`)."""
    seeding: bool = True
    """The reserved engines generate at the start of each step."""
    memory: bool = True
    """Seeding windows are remembered for each fleet size."""
    migration: bool = True
    """A preempted sample keeps its tokens."""
    balancing: bool = True
    """Running samples migrate to balance the load."""
    batch_cap: int = 0
    """The largest batch of a worker, in place of the manager's batch cap where that is larger; 0: the manager's."""


_OURS = Policy(name="rlboost", rule="rlboost", weights="delta", peers=True, notices=True)
_ALL = (
    Policy(name="verl", rule="paper", fleet="none"),
    Policy(name="verl-2x", rule="paper", fleet="none", nodes=2),
    Policy(name="disaggregated", rule="paper", fleet="dedicated", seeding=False),
    # fp32 with tied weights doubled: 8,126,959,616 bytes for Qwen3-1.7B, 2.36 times bf16.
    Policy(name="polyrl", rule="polyrl", bytes_factor=2.36),
    Policy(name="paper", rule="paper"),
    _OURS,
    replace(_OURS, name="rlboost-speculation", speculation=True),
    replace(_OURS, name="rlboost-stale", staleness=1),
)
POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}

_PARTS = (
    replace(_OURS, name="no-seeding", seeding=False),
    replace(_OURS, name="no-memory", memory=False),
    replace(_OURS, name="no-migration", migration=False),
    replace(_OURS, name="no-balancing", balancing=False),
    replace(_OURS, name="no-notices", notices=False),
    replace(_OURS, name="no-deltas", weights="full", peers=False),
)
ABLATIONS: dict[str, Policy] = {policy.name: policy for policy in _PARTS}
"""Ours without one of its parts."""


@dataclass(slots=True)
class Turn:
    """Commands and deliveries, in order."""

    commands: list[tuple[str, Message]] = field(default_factory=list)
    """(worker, command)"""
    deliveries: list[Message] = field(default_factory=list)


class Manager(Protocol):
    """A policy, in the place of the rollout manager."""

    def turn(self, messages: Collection[Message], now: float, has_lease: Callable[[str], bool]) -> Turn:
        """Take the messages that arrived, in their order, and decide.

        Args:
            messages: what workers and trainer sent.
            now: virtual time in seconds.
            has_lease: returns True if a worker's lease is held.

        """
