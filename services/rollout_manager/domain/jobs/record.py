"""The stored record of a job, and its states."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from rlboost.services.rollout_manager.domain.seeding.tuner import WindowTuner
from rlboost.shared.job.spec import StoredJob
from rlboost.shared.messages import ENDED, JobState

_ALLOWED: dict[str, frozenset[JobState]] = {
    "pause": frozenset({"pending", "running", "paused"}),
    "resume": frozenset({"pending", "running", "paused"}),
    "cancel": frozenset({"pending", "running", "paused", "cancelled"}),
}
"""The states in which a command is allowed; repeating a command is no error."""


@dataclass(slots=True)
class Job:
    """The stored record of one job. Times are Unix seconds."""

    id: str
    no: int
    spec: StoredJob
    created_at: float
    state: JobState = "pending"
    step: int = 0
    """Completed steps."""
    started_at: float | None = None
    finished_at: float | None = None
    error: str = ""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, and of the evaluation after it."""
    warnings: list[str] = field(default_factory=list)
    """What the trainer warns of after the last step, one line each."""
    checkpointed_step: int = 0
    trainer: str = ""
    """Name of the trainer that runs it."""
    window_tuner: WindowTuner = field(default_factory=WindowTuner)

    @property
    def ended(self) -> bool:
        """Return True if the job will never run again."""
        return self.state in ENDED

    def allows(self, action: str) -> bool:
        """Return True if `pause`, `resume` or `cancel` is allowed now."""
        return self.state in _ALLOWED[action]

    def enter(self, state: JobState, at: float, error: str = "") -> bool:
        """Change the state; return True if it changed. The state of an ended job is final."""
        if self.ended or state == self.state:
            return False
        self.state = state
        if state == "running" and self.started_at is None:
            self.started_at = at
        if state in ENDED:
            self.finished_at = at
            self.error = error
        return True

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Take a step's metrics; the evaluation after the last step leaves the training metrics as they are."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self.latest = metrics if step < self.spec.steps else metrics | self.latest | evaluation

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return {
            "id": self.id,
            "name": self.spec.name,
            "state": self.state,
            "step": self.step,
            "steps": self.spec.steps,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "latest": self.latest,
            "warnings": self.warnings,
            "error": self.error or None,
        }


_MAX_UNIX_S = 1e11
"""Larger numbers are not taken for Unix seconds."""
_MAX_COUNT = 1e11
"""Larger numbers are not taken for the number of a job or of a step."""


@dataclass(frozen=True, slots=True)
class QuarantinedJob:
    """What is known of a job whose stored data cannot be parsed: see `quarantine`."""

    id: str
    reason: str
    """Why, and what to do."""
    record: dict[str, Any] = field(default_factory=dict)
    """Its stored record; empty if that is not a JSON object."""

    @classmethod
    def from_text(cls, job_id: str, text: str, reason: str) -> QuarantinedJob:
        """Return the quarantined job with as much of its record as can be parsed."""
        try:
            record = json.loads(text.encode(errors="replace"))
        except (ValueError, RecursionError):
            record = None
        return cls(job_id, reason, record if isinstance(record, dict) else {})

    @property
    def _ending(self) -> JobState | None:
        return next((state for state in ENDED if state == self.record.get("state")), None)

    @property
    def state(self) -> JobState:
        """Return the ended state in its record, `failed` if it has none."""
        return self._ending or "failed"

    @property
    def ended(self) -> bool:
        """Return True: nothing happens to it, so clients that follow it may stop."""
        return True

    @property
    def no(self) -> int:
        """Return its number, 0 if that cannot be parsed either."""
        return _count(self.record, "no")

    @property
    def had_ended(self) -> bool:
        """Return True if it had ended before it was quarantined."""
        return self._ending is not None

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        spec = self.record.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        name = spec.get("name")
        return {
            "id": self.id,
            "name": name.encode(errors="replace").decode() if isinstance(name, str) else self.id,
            "state": self.state,
            "step": _count(self.record, "step"),
            "steps": _count(spec, "steps"),
            **{at: _unix_s(self.record, at) for at in ("created_at", "started_at", "finished_at")},
            "latest": {},
            "warnings": [],
            "error": self.reason,
        }


def _unix_s(fields: dict[str, Any], name: str) -> float | None:
    return _number(fields.get(name), _MAX_UNIX_S)


def _count(fields: dict[str, Any], name: str) -> int:
    return int(_number(fields.get(name), _MAX_COUNT) or 0)


def _number(value: Any, limit: float) -> float | None:
    """Return the value if it is a number from 0 up to, not including, the limit; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and 0 <= value < limit else None


_ADAPTER = TypeAdapter(Job)


def to_json(job: Job) -> str:
    """Return the record as JSON."""
    return _ADAPTER.dump_json(job).decode()


def from_json(text: str) -> Job:
    """Return the record in a JSON text.

    Raises:
        ValueError, ConfigError: the text is no record of this version.

    """
    return _ADAPTER.validate_json(text)
