"""The state that users requested of each job, and which started jobs a trainer may take over.

Every trainer reads all commands, so a pause or a cancellation reaches the trainer that runs the job. A job runs on one
trainer: the first idle one; if that dies, its restarted process of the same name, or else any idle trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.shared.messages import JobCommand

TAKEOVER_CHECKS = 6
"""Any trainer may take over a job after this many consecutive checks found no lease; a restarted trainer is back
earlier."""


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
