"""The record of a run: everything that its report is made from, as one JSON file.

Times are Unix seconds of the machine that recorded; durations are seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import ConfigError

Action = Literal["kill", "notice", "join"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Settings(_Part):
    """What was asked for."""

    steps: int
    workers: int
    reserved: int
    chaos: bool
    seed: int
    goal: float | None
    """The held-out accuracy to reach; None when the run is too short for one."""


class Machine(_Part):
    """Where it ran."""

    cores: int
    load: float
    """Runnable processes of others just before the start."""
    platform: str
    python: str


class PlannedChange(_Part):
    """One scheduled change of the fleet."""

    at_step: float
    """Steps done; the fraction is the place within the step."""
    action: Action


class Change(_Part):
    """One change of the fleet that was made."""

    at: float
    step: int
    action: Action
    worker: str
    """The process's name."""


class ProcessEvent(_Part):
    """Something that happened to a local process."""

    at: float
    kind: str
    name: str
    detail: str


class JobEvent(_Part):
    """Something that a service told about the job."""

    at: float
    kind: str
    source: str
    fields: dict[str, Any]


class SeenWorker(_Part):
    """A worker as the manager showed it at one moment."""

    id: str
    role: str
    state: str
    joined_at: float
    version: int | None
    running: int
    tokens_per_s: float


class Observation(_Part):
    """The system at one moment."""

    at: float
    step: int
    job_state: str
    waiting_for: str
    waiting_because: str
    workers: list[SeenWorker]

    @property
    def tokens_per_s(self) -> float:
        """Return the fleet's speed."""
        return sum(worker.tokens_per_s for worker in self.workers)


class Journey(_Part):
    """A sample that more than one worker made."""

    sample: str
    step: int
    prompt: str
    completion: str
    reward: float | None
    spans: list[tuple[str, int, int]]
    """(worker id, weight version, tokens), in order."""


class Record(_Part):
    """One run."""

    format: Literal[1] = 1
    settings: Settings
    machine: Machine
    planned: list[PlannedChange] = []
    began_at: float
    ready_at: float | None = None
    """When every process was ready."""
    job_began_at: float | None = None
    """When the job was handed in."""
    job_ended_at: float | None = None
    job: dict[str, Any] = {}
    """As `GET /v1/jobs/{id}` showed it last."""
    steps: list[dict[str, float]] = []
    """One row of metrics a step."""
    changes: list[Change] = []
    process_events: list[ProcessEvent] = []
    job_events: list[JobEvent] = []
    observations: list[Observation] = []
    journeys: list[Journey] = []
    audit: dict[str, Any] = {}
    cpu_s: dict[str, float] = {}
    """Processor seconds by kind of process, from start to stop."""
    cpu_to_start_s: float = 0.0
    """Of those, spent before the first job: starting processes, importing libraries."""

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Return (steps of training, held-out accuracy) of each evaluation."""
        return [(int(row["step"]), row["eval/reward_mean"]) for row in self.steps if "eval/reward_mean" in row]

    @property
    def training_rows(self) -> list[dict[str, float]]:
        """Return the rows of steps that trained; the row after the last one only evaluates."""
        return [row for row in self.steps if row["step"] < self.settings.steps]

    def made(self, action: Action) -> int:
        """Return how many changes of one kind were made."""
        return sum(change.action == action for change in self.changes)

    def wanted(self, action: Action) -> int:
        """Return how many changes of one kind were scheduled."""
        return sum(change.action == action for change in self.planned)


def load(path: Path) -> Record:
    """Return the record in a file.

    Raises:
        ConfigError: it cannot be read, or is none.

    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the record.json of a run") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} is no record of a run: {place}: {first['msg']}") from error


def process_of(worker_id: str) -> str:
    """Return the process's name in a worker's id, which ends in a random part."""
    return worker_id.rpartition("-")[0]
