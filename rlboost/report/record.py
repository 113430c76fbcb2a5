"""The record of a run as one JSON file: the input of its report.

Times are Unix seconds of the machine that recorded; durations are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.validation import first_error

Action = Literal["kill", "notice", "join"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Settings(_Part):
    """Options of the run."""

    steps: int
    workers: int
    reserved: int
    chaos: bool
    seed: int
    goal: float | None
    """Target held-out accuracy, None if the run is too short for one."""


class Machine(_Part):
    """The machine it ran on."""

    cores: int
    load: float
    """Load average before the start."""
    platform: str
    python: str


class PlannedChange(_Part):
    """A scheduled change of the fleet."""

    at_step: float
    """Completed steps, with the fraction of the current one."""
    action: Action


class Change(_Part):
    """A change that was applied to the fleet."""

    at: float
    step: int
    action: Action
    worker: str
    """The process's name."""


class ProcessEvent(_Part):
    """An event of a local process."""

    at: float
    kind: str
    name: str
    detail: str


class JobEvent(_Part):
    """An event of the job."""

    at: float
    kind: str
    source: str
    fields: dict[str, Any]


class SeenWorker(_Part):
    """A worker as the manager reported it."""

    id: str
    role: str
    state: str
    joined_at: float
    version: int | None
    running: int
    tokens_per_s: float


class Observation(_Part):
    """A snapshot of the system."""

    at: float
    step: int
    job_state: str
    waiting_for: str
    waiting_because: str
    workers: list[SeenWorker]

    @property
    def tokens_per_s(self) -> float:
        """Return the fleet's throughput."""
        return sum(worker.tokens_per_s for worker in self.workers)


class Record(_Part):
    """The record of a run."""

    format: Literal[2] = 2
    settings: Settings
    machine: Machine
    planned: list[PlannedChange] = []
    began_at: float
    ready_at: float | None = None
    """Time when every process was ready."""
    job_began_at: float | None = None
    """Time when the job was submitted."""
    job_ended_at: float | None = None
    job: dict[str, Any] = {}
    """Last response of `GET /v1/jobs/{id}`."""
    steps: list[dict[str, float]] = []
    """One row of metrics per step."""
    changes: list[Change] = []
    process_events: list[ProcessEvent] = []
    job_events: list[JobEvent] = []
    observations: list[Observation] = []
    samples: dict[int, list[dict[str, Any]]] = {}
    """Samples of some steps, by step from 1: of the last one, and of those with a preemption."""
    audit: dict[str, Any] = {}
    """`GET /v1/jobs/{id}/audit`, like the next two; empty or None if the job did not end."""
    cost: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    cpu_s: dict[str, float] = {}
    """CPU seconds by kind of process, from start to stop."""
    cpu_to_start_s: float = 0.0
    """CPU seconds before the first job: starting processes, importing libraries."""

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Return (training steps, held-out accuracy) of each evaluation."""
        return [(int(row["step"]), row["eval/reward_mean"]) for row in self.steps if "eval/reward_mean" in row]

    @property
    def training_rows(self) -> list[dict[str, float]]:
        """Return the rows of training steps; the final row is an evaluation only."""
        return [row for row in self.steps if row["step"] < self.settings.steps]

    def applied(self, action: Action) -> int:
        """Return the number of applied changes of one kind."""
        return sum(change.action == action for change in self.changes)

    def scheduled(self, action: Action) -> int:
        """Return the number of scheduled changes of one kind."""
        return sum(change.action == action for change in self.planned)


def load(path: Path) -> Record:
    """Read a record from a file.

    Raises:
        ConfigError: it cannot be read, or is not a record.

    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the record.json of a run") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is not the record of a run: {first_error(error)}") from error


# --- Check a run's guarantees from its record -------------------------------------------------------------------------


STEPS_TO_LEARN = 8
"""In fewer steps accuracy rises by less than its noise."""


@dataclass(frozen=True)
class Check:
    """One guarantee; `detail` gives the counts."""

    guarantee: str
    held: bool
    detail: str


def checks(record: Record) -> list[Check]:
    """Return the checks that apply to this run, most important first."""
    found = [_completed(record)]
    if record.settings.steps >= STEPS_TO_LEARN:
        found.append(_learned(record))
    found += [_samples(record), _duplicates(record), _tokens(record)]
    if record.settings.chaos:
        found += [_preemptions(record), _joins(record)]
    return found


def _completed(record: Record) -> Check:
    state = str(record.job.get("state", "never created"))
    error = record.job.get("error")
    return Check("The job completed", state == "completed", f"{state}: {error}" if error else state)


def _learned(record: Record) -> Check:
    goal = record.settings.goal
    promise = "Held-out accuracy rose" + (f" to {goal:.0%} or more" if goal else "")
    accuracy = record.accuracy
    if len(accuracy) < 2:
        return Check(promise, False, f"evaluated {len(accuracy)} times")
    first, last = accuracy[0][1], accuracy[-1][1]
    return Check(promise, last > first and last >= (goal or 0.0), f"from {first:.1%} to {last:.1%}")


def _samples(record: Record) -> Check:
    audit = record.audit
    dropped = sum(audit.get("dropped", {}).values())
    requested, delivered, in_flight = (audit.get(name, 0) for name in ("requested", "delivered", "in_flight"))
    detail = f"{requested:,} requested = {delivered:,} delivered + {dropped:,} dropped"
    if in_flight:
        detail += f" + {in_flight:,} in flight"
    held = requested > 0 and requested == delivered + dropped and in_flight == 0
    return Check("Every sample was delivered, or dropped for a stated reason", held, detail)


def _duplicates(record: Record) -> Check:
    twice = int(sum(row.get("samples/duplicates", 0) for row in record.steps))
    return Check("No sample was delivered twice", twice == 0, f"the trainer saw {twice:,} duplicates")


def _tokens(record: Record) -> Check:
    audit = record.audit
    again = sum(audit.get("tokens_regenerated", {}).values())
    generated = audit.get("tokens_generated", 0)
    delivered = audit.get("tokens_delivered", 0) + audit.get("serving", {}).get("tokens_delivered", 0)
    detail = f"{generated:,} generated = {delivered:,} delivered + {again:,} regenerated"
    return Check("Every token is accounted for", generated == delivered + again and generated > 0, detail)


def _preemptions(record: Record) -> Check:
    counted = record.audit.get("preemptions", {})
    without, given = counted.get("without_notice", 0), counted.get("with_notice", 0)
    kills, notices = record.applied("kill"), record.applied("notice")
    scheduled_kills, scheduled_notices = record.scheduled("kill"), record.scheduled("notice")
    held = kills == scheduled_kills and notices == scheduled_notices and without >= kills and given >= notices
    detail = (
        f"{kills} of {scheduled_kills} by SIGKILL without notice, {notices} of {scheduled_notices} with notice; "
        f"the manager counted {without} and {given}"
    )
    return Check("Every scheduled preemption took place, and was noticed", held, detail)


def _joins(record: Record) -> Check:
    applied, scheduled = record.applied("join"), record.scheduled("join")
    return Check("Every scheduled join took place", applied == scheduled, f"{applied} of {scheduled}")
