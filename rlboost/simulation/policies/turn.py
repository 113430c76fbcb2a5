"""What a manager wants done after one turn, and the protocol of a manager under simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from rlboost.shared.messages import Message


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
