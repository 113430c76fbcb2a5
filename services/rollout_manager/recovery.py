"""Rebuilds the manager's world from Redis, at the start and after a write whose reply was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.domain.apply_messages import (
    apply_delivered,
    apply_frames,
    apply_message,
    apply_record,
)
from rlboost.services.rollout_manager.domain.effects import ClearQuarantine
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.record import Job, QuarantinedJob, from_json
from rlboost.services.rollout_manager.domain.quarantine import detach_samples
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.services.rollout_manager.entry_batches import (
    PoisonEntries,
    PoisonFound,
    apply_each,
    apply_in_batches,
    dead_letter,
)
from rlboost.services.rollout_manager.read_streams import SHARED_STREAMS
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import WeightsCommitted, WorkerJoined
from rlboost.shared.progress import CountProgress
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.entries import START, Entry, position
from rlboost.shared.streams.read_size import ReadSize
from rlboost.shared.validation import describe

log = structlog.get_logger(__name__)

BeforeBatch = Callable[[], Awaitable[None]]
"""Awaited before each batch of entries is read: a long recovery must renew the leader's lease."""
MAX_BATCH = 256
"""Maximum number of entries that one read takes; fewer where they are large: see `ReadSize`."""


class Recovered(NamedTuple):
    """A world, and the position in each stream up to which it is complete."""

    world: World
    cursors: dict[str, str]


async def _do_nothing() -> None:
    """Do nothing before a batch."""


async def recover(
    bus: Bus,
    new_world: Callable[[], World],
    now: Now,
    poison: PoisonEntries,
    before_batch: BeforeBatch = _do_nothing,
    replayed: CountProgress | None = None,
) -> Recovered:
    """Rebuild the world, without the entries that cannot be applied.

    The token log is replayed from its oldest entry; entries after the stored cursor also count in the audit. Decisions
    are made only after its end, since a later record may show that a decision was already made.

    Args:
        bus: the broker.
        new_world: returns an empty world.
        now: the present time.
        poison: the entries that cannot be applied; those found here are added.
        before_batch: awaited before each batch of entries is read.
        replayed: updated with the number of entries of the token log that were replayed.

    """
    replayed = replayed or CountProgress("entries")
    while True:
        try:
            return await _Rebuild(bus, new_world(), now, poison, before_batch, replayed).run()
        except PoisonFound as found:
            log.warning("recovery_restarted", reason=str(found))


class _Rebuild:
    """One try to rebuild the world."""

    def __init__(
        self,
        bus: Bus,
        world: World,
        now: Now,
        poison: PoisonEntries,
        before_batch: BeforeBatch,
        replayed: CountProgress,
    ) -> None:
        """Take an empty world; see `recover` for the rest."""
        self._bus = bus
        self._world = world
        self._now = now
        self._poison = poison
        self._before_batch = before_batch
        self._replayed = replayed

    async def run(self) -> Recovered:
        """Fill the world; raise PoisonFound if that must begin again, without the entries that were found."""
        world = self._world
        stored = await self._bus.hash_all(names.MANAGER_CURSORS)
        await self._load_jobs()
        await self._load_workers()
        for job in world.jobs.active():
            await self._load_delivered(job)
        await self._load_committed_versions()
        cursors = {stream: stored.get(stream, START) for stream in SHARED_STREAMS}
        cursors[names.TOKEN_LOG], n_entries = await self._replay_log(cursors[names.TOKEN_LOG])
        self._reattach_samples()
        for job in world.jobs.active():
            await self._apply_quarantined(job)
        for job in world.jobs.active():
            stream = names.rollouts_requested(job.id)
            cursors[stream] = stored.get(stream, START)
        log.info("world_recovered", log_entries=n_entries, samples=len(world.ledger.samples), jobs=len(world.jobs))
        return Recovered(world, cursors)

    async def _batches(self, stream: str) -> AsyncIterator[list[Entry]]:
        """Yield every entry of the stream like `batches`, after awaiting `before_batch` before each read."""
        await self._before_batch()
        async for entries in batches(self._bus, stream):
            yield entries
            await self._before_batch()

    async def _load_jobs(self) -> None:
        for job_id, text in (await self._bus.hash_all(names.JOBS)).items():
            await self._load_job(job_id, text)

    async def _load_job(self, job_id: str, text: str) -> None:
        """Add a job to the world; quarantine it if any of its stored data cannot be parsed."""
        source = f"field {job_id} of the hash {names.JOBS} in Redis"
        audit, lengths = None, dict[str, float]()
        try:
            job = from_json(text)
            if not job.ended:
                source = f"the hash {names.job_audit(job.id)} in Redis"
                if counters := await self._bus.hash_get(names.job_audit(job.id), "counters"):
                    audit = Audit.model_validate_json(counters)
                source = f"the hash {names.job_lengths(job.id)} in Redis"
                stored = await self._bus.hash_all(names.job_lengths(job.id))
                lengths = {prompt: float(length) for prompt, length in stored.items()}
        except (ValueError, ConfigError) as error:
            self._quarantine(job_id, text, f"{source} cannot be parsed ({_describe(error)})")
            return
        self._world.jobs.add(job, audit)
        if not job.ended:
            self._world.progress[job.id].lengths.prompts.update(lengths)

    def _quarantine(self, job_id: str, text: str, cause: str) -> None:
        reason = (
            f"quarantined: {cause}. The job's data are unchanged: start the version of rlboost that wrote them, or "
            "repair them in Redis and restart the rollout manager"
        )
        job = self._world.quarantined[job_id] = QuarantinedJob.from_text(job_id, text, reason)
        log.error("job_quarantined", job=job_id, reason=reason)
        if not job.had_ended:
            self._world.emit_event("job_quarantined", self._now, job_id, reason=reason)

    async def _load_workers(self) -> None:
        for worker_id, text in (await self._bus.hash_all(names.FLEET)).items():
            try:
                self._world.fleet.join(WorkerJoined.model_validate_json(text), self._now.mono)
            except ValueError as error:
                # At its next heartbeat the worker is dismissed as unknown, and joins again.
                log.warning("worker_unreadable", worker=worker_id, reason=_describe(error))

    async def _load_delivered(self, job: Job) -> None:
        def apply(entry: Entry) -> None:
            apply_delivered(self._world, job.id, entry.message)

        async for entries in self._batches(names.rollouts_finished(job.id)):
            for entry, error in apply_each(entries, apply, self._poison):
                log.error("delivered_entry_unapplied", stream=entry.stream, entry=entry.id, reason=str(error))

    async def _load_committed_versions(self) -> None:
        active = {job.id for job in self._world.jobs.active()}
        async for entries in self._batches(names.WEIGHTS_COMMITTED):
            for message in (entry.message for entry in entries):
                if isinstance(message, WeightsCommitted) and message.job_id in active:
                    progress = self._world.progress[message.job_id]
                    progress.committed_version = max(message.version, progress.committed_version)

    async def _replay_log(self, cursor: str) -> tuple[str, int]:
        """Replay the whole token log, counting the entries after `cursor`; return its end and its number of entries."""
        counted_to = position(cursor)
        n_entries, total = 0, await self._bus.length(names.TOKEN_LOG)
        self._replayed.update(n_entries, total)
        async for entries in self._batches(names.TOKEN_LOG):
            for counted, batch in groupby(entries, key=lambda entry: position(entry.id) > counted_to):
                self._replay(batch, counted=counted)
            cursor = entries[-1].id
            n_entries += len(entries)
            self._replayed.update(n_entries, max(n_entries, total))
        return cursor, n_entries

    def _replay(self, entries: Iterable[Entry], *, counted: bool) -> None:
        invalid = apply_in_batches(
            entries,
            lambda frames: apply_frames(self._world, frames, counted=counted),
            lambda entry: apply_record(self._world, entry.message, entry.id, counted=counted),
            self._poison,
        )
        if counted:  # the others were dead-lettered when they were read first
            dead_letter(self._world, invalid)

    def _reattach_samples(self) -> None:
        """Return samples to their workers, unassign those of lost workers, and restart windows that were open."""
        world, now = self._world, self._now.mono
        owned: dict[str, list[Sample]] = {worker_id: [] for worker_id in world.fleet.workers}
        for sample in list(world.ledger.samples.values()):
            if sample.worker in owned:
                owned[sample.worker].append(sample)
            elif sample.worker:
                world.unassign(sample)
        for worker_id, samples in owned.items():
            world.fleet.workers[worker_id].set_samples(samples)
        for progress in world.progress.values():
            if progress.window and progress.window.phase == "open" and world.ledger.samples:
                progress.window.on_placed(now)
        detach_samples(world)
        world.fleet.reset_liveness(now)

    async def _apply_quarantined(self, job: Job) -> None:
        """Apply the messages about a job that an earlier manager stored while the job was quarantined."""

        def apply(entry: Entry) -> None:
            apply_message(self._world, entry.message, entry.id, self._now)

        entries = [entry async for batch in self._batches(names.job_quarantine(job.id)) for entry in batch]
        dead_letter(self._world, apply_each(entries, apply, self._poison))
        if entries:
            self._world.outbox.add(ClearQuarantine(job.id))


def _describe(error: Exception) -> str:
    return "; ".join(describe(error)) if isinstance(error, ValidationError) else str(error)


async def batches(bus: Bus, stream: str) -> AsyncIterator[list[Entry]]:
    """Yield every entry of the stream, at most `MAX_BATCH` at a time."""
    cursor, size = START, ReadSize(MAX_BATCH)
    while entries := await bus.read({stream: cursor}, count=size.count):
        size.update(entries)
        cursor = entries[-1].id
        yield entries
