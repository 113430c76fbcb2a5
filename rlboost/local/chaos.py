"""Preempt and add spot workers on a schedule: pure schedules, and a player that applies one.

A schedule file has one line per event, `time_ms,action,node`, ordered by time:

- `add`: a machine joins with a new worker process. The node name is local to the file.
- `remove`, `notice`: the machine is preempted with notice (SIGTERM). `kill`: without (SIGKILL).

The initial workers are named `worker-1`, `worker-2`, ...
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rlboost.shared.errors import ConfigError

Action = Literal["kill", "notice", "join"]

_ACTIONS: dict[str, Action] = {"add": "join", "remove": "notice", "notice": "notice", "kill": "kill"}
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ChaosEvent:
    """One change of the fleet, `at_s` seconds after the start of the schedule."""

    at_s: float
    action: Action
    node: str


def parse(text: str, present: Collection[str]) -> list[ChaosEvent]:
    """Return the schedule in a file's text.

    Args:
        text: lines of `time_ms,action,node`.
        present: the initial workers.

    Raises:
        ConfigError: names the first invalid line.

    """
    schedule: list[ChaosEvent] = []
    there = set(present)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            event = _parse_line(line)
            _advance(there, schedule[-1].at_s if schedule else 0.0, event)
        except ValueError as error:
            raise ConfigError(f"chaos schedule, line {number} ({line.strip()!r}): {error}") from error
        schedule.append(event)
    return schedule


def _parse_line(line: str) -> ChaosEvent:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3:
        raise ValueError("expected time_ms,add|remove|notice|kill,node")
    time_ms, action, node = parts
    if not time_ms.isdecimal():
        raise ValueError(f"{time_ms!r} is not a time: give whole milliseconds from the start")
    if action not in _ACTIONS:
        raise ValueError(f"{action!r} is not an action: use add, remove, notice or kill")
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r} is not a node name: use letters, digits, '.', '_' and '-'")
    return ChaosEvent(int(time_ms) / 1000, _ACTIONS[action], node)


def _advance(there: set[str], last_at_s: float, event: ChaosEvent) -> None:
    if event.at_s < last_at_s:
        raise ValueError("it is earlier than the line before it: sort the lines by time")
    if event.action == "join":
        if event.node in there:
            raise ValueError(f"{event.node} is already there")
        there.add(event.node)
    else:
        if event.node not in there:
            raise ValueError(f"{event.node} is not present; present nodes: {', '.join(sorted(there)) or 'none'}")
        there.remove(event.node)


def generate(
    seed: int, *, nodes: Sequence[str], preemptions: int, duration_s: float, away_s: float = 3.0
) -> list[ChaosEvent]:
    """Return a schedule of preemptions, every second one without notice, each followed by a join.

    Args:
        seed: makes the schedule reproducible.
        nodes: the initial workers; a preempted node comes back.
        preemptions: number of preemptions, spread over the duration with jitter.
        duration_s: all preemptions fall within it; the last joins may come up to `away_s` later.
        away_s: longest absence of a node; the shortest is half of it.

    Raises:
        ConfigError: there is no node to preempt.

    """
    if not nodes:
        raise ConfigError("a chaos schedule needs at least one spot worker: start with --workers 1 or more")
    draw = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    spacing_s = duration_s / preemptions if preemptions else 0.0
    first = draw.randrange(2)
    back_at_s = dict.fromkeys(nodes, 0.0)
    events: list[ChaosEvent] = []
    for number in range(preemptions):
        at_s = (number + draw.random()) * spacing_s
        there = [node for node in nodes if back_at_s[node] <= at_s]
        node = draw.choice(there or [min(nodes, key=lambda name: back_at_s[name])])
        at_s = max(at_s, back_at_s[node])
        back_at_s[node] = at_s + draw.uniform(away_s / 2, away_s)
        events.append(ChaosEvent(at_s, "kill" if number % 2 == first else "notice", node))
        events.append(ChaosEvent(back_at_s[node], "join", node))
    return sorted(events, key=lambda event: (event.at_s, event.action != "join"))


class Fleet(Protocol):
    """The workers that a schedule is applied to."""

    def kill(self, name: str) -> None:
        """Preempt a worker without notice."""

    def notice(self, name: str) -> None:
        """Preempt a worker with notice."""

    def join_worker(self) -> str:
        """Start a new worker; return its name."""


async def play(schedule: Sequence[ChaosEvent], fleet: Fleet) -> None:
    """Apply the schedule to the fleet, starting now; return after its last event."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    worker_of: dict[str, str] = {}
    for event in schedule:
        await asyncio.sleep(began + event.at_s - loop.time())
        worker = worker_of.get(event.node, event.node)
        match event.action:
            case "kill":
                fleet.kill(worker)
            case "notice":
                fleet.notice(worker)
            case "join":
                worker_of[event.node] = fleet.join_worker()
