"""The state that users requested of each job, which started jobs a trainer may take over, and which kill trainers.

Every trainer reads all commands, so a pause or a cancellation reaches the trainer that runs the job. A job runs on one
trainer: the first idle one; if that dies, its restarted process of the same name, or else any idle trainer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from rlboost.shared.messages import JobCommand

TAKEOVER_CHECKS = 6
"""Any trainer may take over a job after this many consecutive checks found no lease; a restarted trainer is back
earlier."""

MAX_DEATHS = 3
"""Deaths of its trainers without a new step after which a job fails, so that it does not stop all other jobs."""


@dataclass(slots=True)
class JobStates:
    """The state that the job commands read so far have produced, and how often each job was found without a lease."""

    trainer: str
    """Name of this trainer."""
    _created_by: dict[str, str] = field(default_factory=dict)
    """Job -> id of the entry that created it."""
    _paused: set[str] = field(default_factory=set)
    _cancelled: set[str] = field(default_factory=set)
    _checks_without_lease: dict[str, int] = field(default_factory=dict)
    """Job -> number of consecutive checks that found no lease."""

    def apply(self, entry_id: str, command: JobCommand) -> None:
        """Apply the next command."""
        match command.action:
            case "create":
                self._created_by.setdefault(command.job_id, entry_id)
            case "pause":
                self._paused.add(command.job_id)
            case "resume":
                self._paused.discard(command.job_id)
            case "cancel":
                self._cancelled.add(command.job_id)

    def creates(self, entry_id: str, command: JobCommand) -> bool:
        """Return True if this command, already applied, created its job; False for a repetition."""
        return command.action == "create" and self._created_by.get(command.job_id) == entry_id

    def is_paused(self, job_id: str) -> bool:
        """Return True if the job is to be paused."""
        return job_id in self._paused

    def is_cancelled(self, job_id: str) -> bool:
        """Return True if the job is to be cancelled."""
        return job_id in self._cancelled

    def may_take_over(self, job_id: str, owner: str | None, *, held: bool) -> bool:
        """Count a check of a started job, and return True if this trainer may take it over.

        Args:
            job_id: the job.
            owner: name of the trainer that claimed it last, None if unknown.
            held: whether a trainer holds the job's lease.

        """
        if owner == self.trainer:
            return True
        self._checks_without_lease[job_id] = 0 if held else self._checks_without_lease.get(job_id, 0) + 1
        return self._checks_without_lease[job_id] >= TAKEOVER_CHECKS


@dataclass(frozen=True, slots=True)
class Attempts:
    """How the trainers of a job have died since the job last finished a step for the first time."""

    step: int = 0
    """Number of finished steps."""
    deaths: tuple[str, ...] = ()
    """How each trainer ended, empty where that is unknown."""
    trainer: str = ""
    """The trainer that runs the job; empty after an orderly stop, and while the job is paused."""

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Return what `to_json` has stored; nothing of a text that is something else."""
        try:
            stored = json.loads(text or "{}")
            return cls(int(stored["step"]), tuple(map(str, stored["deaths"])), str(stored["trainer"]))
        except (ValueError, TypeError, KeyError):
            return cls()

    def to_json(self) -> str:
        """Return the text to store."""
        return json.dumps(asdict(self))

    def started(self, trainer: str, last_exit: str | None) -> Self:
        """Return the state when a trainer claims the job.

        Args:
            trainer: its name.
            last_exit: how the earlier process of this trainer ended, empty if unknown, None if it was asked to.

        """
        cause = last_exit if self.trainer == trainer else ""
        return replace(self.died(cause) if self.trainer and cause is not None else self, trainer=trainer)

    def reached(self, step: int, trainer: str) -> Self:
        """Return the state while `trainer` runs the job, empty while it is paused, which has finished `step` steps."""
        if step > self.step:
            return replace(self, step=step, deaths=(), trainer=trainer)
        return replace(self, trainer=trainer)

    def died(self, cause: str) -> Self:
        """Return the state after the trainer's process, or one that it needs, has died."""
        return replace(self, deaths=(*self.deaths, cause), trainer="")

    @property
    def refusal(self) -> str:
        """Return why the job is not run again, an empty text if it is."""
        if len(self.deaths) < MAX_DEATHS:
            return ""
        causes = ", ".join(dict.fromkeys(cause or "of an unknown cause" for cause in self.deaths))
        memory = " (out of memory?)" if "SIGKILL" in causes else ""
        return (
            f"its trainer died {len(self.deaths)} times without a finished step in between: {causes}{memory}. The "
            "trainer's log has its last lines; correct the job, its data or the machine, and create the job again"
        )
