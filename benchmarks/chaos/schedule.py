"""Which fault happens when: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill", "terminate", "stop", "disconnect", "out_of_memory", "disk_full", "partition", "flip_bytes", "kill_all"
]
ROLES = ("preemptible", "reserved", "trainer", "manager", "standby", "weight_store", "redis")
WEIGHTS: dict[Kind, int] = {
    "kill": 6,
    "terminate": 3,
    "stop": 5,
    "disconnect": 2,
    "out_of_memory": 2,
    "disk_full": 2,
    "partition": 2,
    "flip_bytes": 2,
    "kill_all": 1,
}
"""How often each kind is chosen, relative to the others."""
_LONGEST_S: dict[Kind, float] = {"stop": 60.0, "out_of_memory": 8.0, "disk_full": 8.0, "partition": 15.0}
"""The longest duration of faults that last."""
_AIMED: tuple[Kind, ...] = ("kill", "terminate", "stop")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at_s` seconds after the start."""

    at_s: float
    kind: Kind
    role: str = ""
    """Whose process gets the signal; empty for other kinds."""
    duration_s: float = 0.0
    """0 for a fault that does not last."""
    seed: int = 0
    """Chooses among what is there when it happens: one of several workers, or a chunk."""


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
        lasts_s = max(1.0, longest_s * draw.random() ** 2) if longest_s else 0.0
        faults.append(Fault(at_s, kind, role, lasts_s, draw.getrandbits(32)))
        at_s += every_s * draw.uniform(0.5, 1.5)
    return faults
