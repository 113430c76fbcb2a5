"""A job's record and its states."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.rollout_manager.domain.offload import Offload
from shared.jobspec import StoredJob
from shared.messages import JobState

ENDED: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})

_ALLOWED: dict[str, frozenset[JobState]] = {
    "pause": frozenset({"pending", "running", "paused"}),
    "resume": frozenset({"pending", "running", "paused"}),
    "cancel": frozenset({"pending", "running", "paused", "cancelled"}),
}
"""From which states a command makes sense; repeating one is no error."""


@dataclass(slots=True)
class Job:
    """What is known of one job. Times are Unix seconds."""

    id: str
    no: int
    spec: StoredJob
    created_at: float
    state: JobState = "pending"
    step: int = 0
    """Steps done."""
    started_at: float | None = None
    finished_at: float | None = None
    error: str = ""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, and of the evaluation behind it."""
    checkpointed_step: int = 0
    trainer: str = ""
    """Name of the trainer that runs it."""
    offload: Offload = field(default_factory=Offload)

    @property
    def ended(self) -> bool:
        """Tell whether the job will never run again."""
        return self.state in ENDED

    def allows(self, action: str) -> bool:
        """Tell whether `pause`, `resume` or `cancel` makes sense now."""
        return self.state in _ALLOWED[action]

    def enter(self, state: JobState, at: float, error: str = "") -> bool:
        """Change the state; tell whether it changed. An ended job stays as it ended."""
        if self.ended or state == self.state:
            return False
        self.state = state
        if state == "running" and self.started_at is None:
            self.started_at = at
        if state in ENDED:
            self.finished_at = at
            self.error = error
        return True

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Take in a step's metrics; behind the last step comes an evaluation, which leaves what training said."""
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
            "error": self.error or None,
        }


_LATEST = 1e11
"""Unix seconds that are still a date."""


@dataclass(frozen=True, slots=True)
class AsideJob:
    """What can be told of a job whose stored data cannot be read: see `aside`."""

    id: str
    reason: str
    """Why, and what to do."""
    said: dict[str, Any] = field(default_factory=dict)
    """Its record, as far as it is one."""

    @classmethod
    def of(cls, job_id: str, text: str, reason: str) -> AsideJob:
        """Return what is left of a record."""
        try:
            said = json.loads(text.encode(errors="replace"))
        except (ValueError, RecursionError):
            said = None
        return cls(job_id, reason, said if isinstance(said, dict) else {})

    @property
    def _ending(self) -> JobState | None:
        return next((state for state in ENDED if state == self.said.get("state")), None)

    @property
    def state(self) -> JobState:
        """Return how it ended, before it could not be read any more; `failed` where it had not."""
        return self._ending or "failed"

    @property
    def ended(self) -> bool:
        """Tell that nothing happens to it: whoever follows it has seen all."""
        return True

    @property
    def no(self) -> int:
        """Return its number, 0 where that cannot be read either."""
        return int(_number(self.said, "no") or 0)

    @property
    def had_ended(self) -> bool:
        """Tell whether it had ended before."""
        return self._ending is not None

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        spec = self.said.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        name = spec.get("name")
        return {
            "id": self.id,
            "name": name.encode(errors="replace").decode() if isinstance(name, str) else self.id,
            "state": self.state,
            "step": int(_number(self.said, "step") or 0),
            "steps": int(_number(spec, "steps") or 0),
            **{at: _number(self.said, at) for at in ("created_at", "started_at", "finished_at")},
            "latest": {},
            "error": self.reason,
        }


def _number(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and 0 <= value < _LATEST else None


_ADAPTER = TypeAdapter(Job)


def to_json(job: Job) -> str:
    """Return the record as JSON."""
    return _ADAPTER.dump_json(job).decode()


def from_json(text: str) -> Job:
    """Return the record in a JSON text.

    Raises:
        ValueError, ConfigError: it is none, or not one of this version.

    """
    return _ADAPTER.validate_json(text)
