"""Which jobs a trainer may claim: new ones, and started ones whose trainer is dead.

All trainers share one consumer group of `jobs.commands`. The command that creates a job is consumed by one of them, and
stays pending until the job has ended, so that another trainer can take over.
"""

from __future__ import annotations

import json

from rlboost.services.trainer.domain.job_states import JobStates
from rlboost.services.trainer.job.active import LEASE_TTL_S, ActiveJob
from rlboost.services.trainer.runtime.job_streams import JobStreams, RetryingBus
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.command_signature import is_signed
from rlboost.shared.messages import JobCommand
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Ack
from rlboost.shared.streams.entries import Entry
from rlboost.shared.streams.fenced_lease import FencedLease

_CLAIMED_AT_ONCE = 10_000


class JobClaims:
    """The commands that one trainer claims from the consumer group."""

    def __init__(self, bus: RetryingBus, jobs: JobStates, *, name: str, incarnation: str, token: str) -> None:
        """Bind to the consumer group.

        Args:
            bus: the broker.
            jobs: the state that all commands read so far have produced.
            name: the trainer's name.
            incarnation: the trainer's name as a consumer, unique per process.
            token: the system's token, with which managers sign commands.

        """
        self._bus = bus
        self._jobs = jobs
        self._name = name
        self._incarnation = incarnation
        self._token = token
        self._quarantined: set[str] = set()
        """Commands whose job file this trainer cannot parse; another trainer may claim them."""

    async def next_command(self) -> Entry | None:
        """Consume the next command, None if there is none."""
        stream = names.JOB_COMMANDS
        new = await self._bus(lambda bus: bus.consume(stream, names.TRAINER_GROUP, self._incarnation, count=1))
        return new[0] if new else None

    async def takeover_candidates(self) -> list[tuple[Entry, bool]]:
        """Return the commands of started jobs that this trainer may take over.

        Each comes with `contested`: True unless this trainer ran the job last. Then several trainers may claim it at
        once, and only the one that gets the lease runs it.
        """
        claimed = await self._pending()
        jobs = {e.id: e.message.job_id for e, _ in claimed if isinstance(e.message, JobCommand)}
        jobs = {
            entry_id: job_id
            for entry_id, job_id in jobs.items()
            if entry_id not in self._quarantined or self._jobs.is_cancelled(job_id)
        }
        if not jobs:
            return []
        owners = await self._bus(lambda bus: bus.hash_all(names.JOB_TRAINERS))
        held = await self._bus(
            lambda bus: bus.cap_and_read_leases([names.trainer_lease(job_id) for job_id in jobs.values()])
        )
        free = {
            entry_id
            for (entry_id, job_id), holder in zip(jobs.items(), held, strict=True)
            if self._jobs.may_take_over(job_id, owners.get(job_id), held=holder is not None)
        }
        return [(entry, owners.get(jobs[entry.id]) != self._name) for entry, _ in claimed if entry.id in free]

    async def job_of(self, entry: Entry) -> ActiveJob | None:
        """Return the job that a claimed command creates.

        None if it creates none: another command is acknowledged, an invalid entry goes to the dead-letter stream, and a
        job that cannot be parsed is quarantined.
        """
        command = signed_command(entry, self._token)
        if command is None:
            reason = f"a {entry.message.tag} does not belong in this stream"
            if isinstance(entry.message, JobCommand):
                reason = "no manager has signed this command: give managers and trainers the same RLBOOST_TOKEN"
            await self._bus(lambda bus: bus.dead_letter(entry.stream, names.TRAINER_GROUP, entry, reason))
            return None
        if not self._jobs.creates(entry.id, command):
            # Every trainer reads and applies the other commands.
            await self._bus.transact([Ack(entry.stream, names.TRAINER_GROUP, (entry.id,))])
            return None
        if not self._jobs.is_cancelled(command.job_id) and (why := _parse_error(command.spec_json)):
            await self._quarantine(entry.id, command.job_id, why)
            return None
        lease = FencedLease(
            self._bus.raw, names.trainer_lease(command.job_id), names.trainer_epoch(command.job_id), LEASE_TTL_S
        )
        return ActiveJob(command.job_id, command.job_no, command.spec_json, entry.id, lease)

    async def is_pending(self, command: str) -> bool:
        """Return True if the job that a command creates has not ended."""
        return any(entry.id == command for entry, _ in await self._pending())

    async def _pending(self) -> list[tuple[Entry, int]]:
        stream, group = names.JOB_COMMANDS, names.TRAINER_GROUP
        return await self._bus(
            lambda bus: bus.claim(stream, group, self._incarnation, min_idle_s=0, count=_CLAIMED_AT_ONCE)
        )

    async def _quarantine(self, command: str, job_id: str, why: str) -> None:
        """Leave a job unchanged, its command pending, for a trainer that can parse its job file."""
        self._quarantined.add(command)
        reason = (
            f"the trainer cannot parse the job file ({why}). The job is unchanged: start the version of rlboost that "
            "wrote it, or cancel the job from a manager that can parse it"
        )
        await JobStreams(self._bus, job_id).emit_event("job_quarantined", trainer=self._name, reason=reason)


def signed_command(entry: Entry, token: str) -> JobCommand | None:
    """Return the command in an entry, None if no manager has signed one."""
    command = entry.message
    return command if isinstance(command, JobCommand) and is_signed(command, token) else None


def _parse_error(spec_json: str) -> str:
    """Return why this version cannot parse a stored job, an empty text if it can."""
    try:
        job_spec.parse_stored(json.loads(spec_json))
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""
