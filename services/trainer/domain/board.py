"""What users want of jobs, and which of the jobs that were begun and not ended a trainer may take over.

Every trainer reads all commands, so that a pause or a cancel reaches whoever runs the job. A job itself is for one
trainer: the first that is free, then, should that one die, its successor of the same name, or else any that is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import JobCommand

ORPHAN_LOOKS = 6
"""A job that was seen without its trainer's lease so often in a row is anybody's: its own trainer is back sooner."""


@dataclass(slots=True)
class Board:
    """A fold over `jobs.commands`, and how long jobs have been seen without a trainer."""

    trainer: str
    """Whose board it is."""
    _created_by: dict[str, str] = field(default_factory=dict)
    """Job -> the entry that created it."""
    _paused: set[str] = field(default_factory=set)
    _cancelled: set[str] = field(default_factory=set)
    _looks: dict[str, int] = field(default_factory=dict)
    """Job -> how often in a row nobody held its lease."""

    def note(self, entry_id: str, command: JobCommand) -> None:
        """Take in the next command."""
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
        """Tell whether it is this command, already noted, that created its job: a repetition creates nothing."""
        return command.action == "create" and self._created_by.get(command.job_id) == entry_id

    def paused(self, job_id: str) -> bool:
        """Tell whether the job shall stand still."""
        return job_id in self._paused

    def cancelled(self, job_id: str) -> bool:
        """Tell whether the job shall end."""
        return job_id in self._cancelled

    def may_take_over(self, job_id: str, owner: str | None, *, held: bool) -> bool:
        """Look at a job that was begun, and tell whether it may be taken over.

        Args:
            job_id: the job.
            owner: name of the trainer that took it last, None where that is not known.
            held: whether some trainer holds the job's lease.

        """
        if owner == self.trainer:
            return True
        self._looks[job_id] = 0 if held else self._looks.get(job_id, 0) + 1
        return self._looks[job_id] >= ORPHAN_LOOKS
