"""Why a job's last step took as long as it did: its parts, and how it differs from the steps before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlboost.job_lines import brief_duration

PARTS = (
    ("time/seeding_s", "reserved workers generate"),
    ("time/wait_s", "waiting for samples"),
    ("time/train_s", "training"),
    ("time/publish_s", "publishing weights"),
)
"""Metric and name of each part of a step, as the web page has them; the rest of a step is `other`."""
STEPS_BEFORE = 10
"""Steps that the last one is compared with."""
_FEWEST_BEFORE = 3
_DIFFERS = 0.2
"""A smaller relative difference is not mentioned."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a step took than those before it; negative if it took less."""

    steps: int
    """Steps that it is compared with, by their medians."""
    seconds: float
    part: str
    """The part that differs most in the same direction."""
    part_seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step took."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    parts: dict[str, float]
    """Name -> seconds."""
    difference: Difference | None
    """None with few steps before it, or if it took about as long."""

    def text(self) -> str:
        """Format it in the words of the web page."""
        longest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = [f"{name} {100 * s / self.seconds:.0f} %" for name, s in longest_first if s / self.seconds >= 0.01]
        text = f"step {self.step} took {brief_duration(self.seconds)}: {', '.join(shares)}"
        if (than := self.difference) is None:
            return text
        word = "longer" if than.seconds > 0 else "less"
        return (
            f"{text}. That is {brief_duration(abs(than.seconds))} {word} than the median of the {than.steps} steps "
            f"before, mostly {than.part} ({brief_duration(abs(than.part_seconds))} {word})"
        )


def last_step_time(rows: Sequence[Mapping[str, float]], steps: int) -> StepTime | None:
    """Return the time of the last step in rows of metrics, oldest first; None before one has ended.

    Args:
        rows: metrics of the job's last steps.
        steps: number of the job's steps; the row after the last step has only an evaluation.

    """
    timed = [row for row in rows if row.get("time/step_s") and not 0 < steps <= row["step"]]
    if not timed:
        return None
    *before, row = timed
    total, parts = row["time/step_s"], _parts(row)
    return StepTime(int(row["step"]) + 1, total, parts, _difference(total, parts, before[-STEPS_BEFORE:]))


def _parts(row: Mapping[str, float]) -> dict[str, float]:
    parts = {name: row.get(metric, 0.0) for metric, name in PARTS}
    return parts | {"other": max(0.0, row["time/step_s"] - sum(parts.values()))}


def _difference(total: float, parts: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> Difference | None:
    if len(before) < _FEWEST_BEFORE:
        return None
    usual = median(row["time/step_s"] for row in before)
    seconds = total - usual
    if abs(seconds) <= _DIFFERS * usual:
        return None
    parts_before = [_parts(row) for row in before]
    changes = {name: s - median(row[name] for row in parts_before) for name, s in parts.items()}
    part = max(changes, key=lambda name: changes[name] if seconds > 0 else -changes[name])
    return Difference(len(before), seconds, part, changes[part])
