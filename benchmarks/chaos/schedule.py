"""Which fault happens when: a pure function of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill",
    "terminate",
    "stop",
    "step_clock",
    "disconnect",
    "out_of_memory",
    "disk_full",
    "partition",
    "flip_bytes",
    "kill_all",
    "hold",
    "undead",
    "drip",
    "kill_trainer",
]
ROLES = ("preemptible", "reserved", "trainer", "manager", "standby", "weight_store", "redis")
WEIGHTS: dict[Kind, int] = {
    "kill": 6,
    "terminate": 3,
    "stop": 5,
    "step_clock": 3,
    "disconnect": 2,
    "out_of_memory": 2,
    "disk_full": 2,
    "partition": 2,
    "flip_bytes": 2,
    "kill_all": 1,
    "hold": 2,
    "undead": 1,
    "drip": 1,
    "kill_trainer": 1,
}
"""How often each kind is chosen, relative to the others."""
_LONGEST_S: dict[Kind, float] = {
    "stop": 60.0,
    "step_clock": 60.0,
    "out_of_memory": 8.0,
    "disk_full": 8.0,
    "partition": 15.0,
    "hold": 60.0,
    "undead": 30.0,
    "drip": 30.0,
}
"""The longest duration of faults that last."""
_SHORTEST_S: dict[Kind, float] = {"hold": 30.0, "undead": 20.0}
"""The shortest duration, where it is not 1 s: a client first joins and is assigned samples."""
_AIMED: tuple[Kind, ...] = ("kill", "terminate", "stop", "step_clock")
_SHORTEST_STEP_S, _LONGEST_STEP_S = 10, 600


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at_s` seconds after the start."""

    at_s: float
    kind: Kind
    role: str = ""
    """Whose process gets the signal or the step; empty for other kinds."""
    duration_s: float = 0.0
    """0 for a fault that does not last."""
    seed: int = 0
    """Chooses among what is there when it happens: one of several workers, or a chunk."""
    offset_s: int = 0
    """How far a clock is ahead until the end of the fault; negative: behind."""


def plan(seed: int, duration_s: float, kinds: Collection[Kind], *, every_s: float) -> list[Fault]:
    """Return the faults of a run in order of time, on average one per `every_s`; each kind once before the others."""
    draw = random.Random(seed)
    first = sorted(kinds)
    draw.shuffle(first)
    weights = [WEIGHTS[kind] for kind in first]
    faults: list[Fault] = []
    at_s = every_s * draw.uniform(0.5, 1.5)
    while at_s < duration_s and first:
        kind = first[len(faults)] if len(faults) < len(first) else draw.choices(first, weights)[0]
        role = draw.choice(ROLES) if kind in _AIMED else ""
        longest_s = min(_LONGEST_S.get(kind, 0.0), duration_s / 4)
        # Short ones are more frequent: they end in the middle of what the others do about them.
        lasts_s = max(_SHORTEST_S.get(kind, 1.0), longest_s * draw.random() ** 2) if longest_s else 0.0
        offset_s = _step_s(draw) if kind == "step_clock" else 0
        faults.append(Fault(at_s, kind, role, lasts_s, draw.getrandbits(32), offset_s))
        at_s += every_s * draw.uniform(0.5, 1.5)
    return faults


def _step_s(draw: random.Random) -> int:
    """Return a step forward or back; each order of magnitude is as frequent."""
    size_s = _SHORTEST_STEP_S * math.pow(_LONGEST_STEP_S / _SHORTEST_STEP_S, draw.random())
    return draw.choice((-1, 1)) * round(size_s)
