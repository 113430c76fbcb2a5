"""Rebuilds the manager's world from Redis, at the start and after a write whose reply was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.domain.apply_messages import (
    apply_delivered,
    apply_frames,
    apply_record,
    enter_state,
)
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Store, dead_letter, save_job
from rlboost.services.rollout_manager.domain.jobs import Audit, Job, JobEntry, from_json, readable_part
from rlboost.services.rollout_manager.domain.queue import unassign
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.errors import ConfigError, RLBoostError, Unprocessable
from rlboost.shared.ids import MAX_JOBS
from rlboost.shared.messages import TokenFrame, WeightsCommitted, WorkerJoined
from rlboost.shared.progress import CountProgress
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import (
    START,
    Bus,
    Entry,
    Op,
    RawEntry,
    ReadSize,
    dead_letter_op,
    position,
    report_dead_letter,
)
from rlboost.shared.validation import describe

log = structlog.get_logger(__name__)

# --- batches of entries -----------------------------------------------------------------------------------------------
#
# Adjacent token frames are applied at once, every other entry by itself; those that are invalid are found.


MAX_FRAMES_PER_BATCH = 512
"""Larger batches are no faster a frame (benchmarks.token_plane), and need more memory."""


class Applied(NamedTuple):
    """What came of entries."""

    effects: list[Effect]
    invalid: list[tuple[Entry, Unprocessable]]
    """Entries that changed nothing, each with its error."""


class PoisonFound(RLBoostError):
    """Applying entries failed unexpectedly and may have left the world half changed: rebuild it, then apply the rest.

    The entries are recorded in the `PoisonEntries` that the caller has passed, so that the next try gets past them.
    """


class PoisonEntries:
    """The entries that one manager cannot apply. They are skipped, so that one entry never stops the manager."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._suspects: set[tuple[str, str]] = set()
        """Entries of failed batches, which are applied one by one."""

    def reason(self, entry: Entry) -> str | None:
        """Return why an entry is skipped, None if it is not."""
        return self._reasons.get((entry.stream, entry.id))

    def is_single(self, entry: Entry) -> bool:
        """Return True if an entry must be applied by itself."""
        key = entry.stream, entry.id
        return key in self._suspects or key in self._reasons

    def add(self, entries: Sequence[Entry], error: Exception) -> PoisonFound:
        """Record that these entries failed together; return the exception to raise."""
        keys = [(entry.stream, entry.id) for entry in entries]
        if len(keys) == 1:
            self._reasons[keys[0]] = f"it cannot be applied: {error!r}"
            log.error("entry_failed", stream=keys[0][0], entry=keys[0][1], exc_info=error)
        else:
            self._suspects.update(keys)
        return PoisonFound(f"{len(keys)} entries from {keys[0]} on: {error!r}")


def apply_in_batches(
    entries: Iterable[Entry],
    apply_frames: Callable[[list[TokenFrame]], list[Effect]],
    apply_entry: Callable[[Entry], list[Effect]],
    poison: PoisonEntries,
) -> Applied:
    """Apply entries in order.

    Args:
        entries: in the order in which they apply.
        apply_frames: applies several frames; raises Unprocessable, without any effect, if one of them is invalid.
        apply_entry: applies any single entry.
        poison: entries to skip.

    Raises:
        PoisonFound: an entry failed unexpectedly.

    """
    all_applied = Applied([], [])
    for batch in _batches(entries, poison):
        frames = [entry.message for entry in batch if isinstance(entry.message, TokenFrame)]
        if len(frames) > 1:
            try:
                all_applied.effects.extend(apply_frames(frames))
                continue
            except Unprocessable:
                pass  # apply them one by one to find the invalid frame
            except Exception as error:
                raise poison.add(batch, error) from error
        applied = apply_each(batch, apply_entry, poison)
        all_applied.effects.extend(applied.effects)
        all_applied.invalid.extend(applied.invalid)
    return all_applied


def apply_each(
    entries: Iterable[Entry], apply_entry: Callable[[Entry], list[Effect]], poison: PoisonEntries
) -> Applied:
    """Apply entries one by one; see `apply_in_batches`."""
    applied = Applied([], [])
    for entry in entries:
        if reason := poison.reason(entry):
            applied.invalid.append((entry, Unprocessable(reason)))
            continue
        try:
            applied.effects.extend(apply_entry(entry))
        except Unprocessable as error:
            applied.invalid.append((entry, error))
        except Exception as error:
            raise poison.add([entry], error) from error
    return applied


def with_dead_letters(applied: Applied, now: Now) -> list[Effect]:
    """Return the effects; the last are the dead letters, in one transaction with the position after these entries."""
    for entry, error in applied.invalid:
        report_dead_letter(entry.stream, entry.id, str(error))
        applied.effects.append(dead_letter(entry.stream, entry.id, entry.message, str(error), now))
    return applied.effects


def _batches(entries: Iterable[Entry], poison: PoisonEntries) -> Iterator[list[Entry]]:
    def is_batched(entry: Entry) -> bool:
        return isinstance(entry.message, TokenFrame) and not poison.is_single(entry)

    for batched, group in groupby(entries, key=is_batched):
        while batch := list(islice(group, MAX_FRAMES_PER_BATCH if batched else 1)):
            yield batch


# --- read streams -----------------------------------------------------------------------------------------------------
#
# The streams that the manager reads, and which of them it trims.


SHARED_STREAMS = {
    names.JOB_COMMANDS: False,  # trainers read these two, too
    names.JOB_CONTROLS: False,
    names.JOB_REPORTS: True,
    names.WEIGHTS_COMMITTED: False,  # all read it, from its beginning
    names.TOKEN_LOG: False,  # as far as `compact` allows
    names.WORKER_HEARTBEATS: True,
}
"""Stream that is read for all jobs -> True if nothing needs its entries after the manager has applied them."""


def is_trimmed_when_read(stream: str) -> bool:
    """Return True if the manager trims the stream up to what it has read, as it does those of each active job."""
    return SHARED_STREAMS.get(stream, True)


def are_below(count: int, entries: Sequence[Entry] | Sequence[RawEntry]) -> bool:
    """Return True if a read of at most `count` entries of each stream has read every stream to its end."""
    return len(entries) < count or max(Counter(entry.stream for entry in entries).values()) < count


# --- rebuild ----------------------------------------------------------------------------------------------------------


BeforeBatch = Callable[[], Awaitable[None]]
"""Awaited before each batch of entries is read: a long recovery must renew the leader's lease."""
StopTrainer = Callable[[Job], Op]
MAX_BATCH = 256
"""Maximum number of entries that one read takes; fewer where they are large: see `ReadSize`."""


class Recovered(NamedTuple):
    """A world, and the position in each stream up to which it is complete."""

    world: World
    cursors: dict[str, str]
    effects: list[Effect]
    """Of the entries that no earlier manager has applied."""


async def _do_nothing() -> None:
    """Do nothing before a batch."""


async def recover(
    bus: Bus,
    new_world: Callable[[], World],
    now: Now,
    poison: PoisonEntries,
    before_batch: BeforeBatch = _do_nothing,
    replayed: CountProgress | None = None,
    stop_trainer: StopTrainer | None = None,
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
        stop_trainer: returns what has the trainer end a job that fails because its stored data cannot be parsed.

    """
    replayed = replayed or CountProgress("entries")
    while True:
        try:
            return await _Rebuild(bus, new_world(), now, poison, before_batch, replayed, stop_trainer).run()
        except PoisonFound as found:
            log.warning("recovery_restarted", reason=str(found))


class _Unreadable(NamedTuple):
    """A stored field of a job that cannot be parsed."""

    key: str
    field: str
    text: str
    cause: str


@dataclass(slots=True)
class _Rebuild:
    """One try to rebuild the world, which is empty at first; see `recover` for the rest."""

    _bus: Bus
    _world: World
    _now: Now
    _poison: PoisonEntries
    _before_batch: BeforeBatch
    _replayed: CountProgress
    _stop_trainer: StopTrainer | None
    _effects: list[Effect] = field(default_factory=list)
    _unreadable: dict[str, _Unreadable] = field(default_factory=dict)
    """Job id -> why it fails."""

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
        self._fail_unreadable()
        for job in world.jobs.active():
            stream = names.rollouts_requested(job.id)
            cursors[stream] = stored.get(stream, START)
        log.info("world_recovered", log_entries=n_entries, samples=len(world.ledger.samples), jobs=len(world.jobs))
        return Recovered(world, cursors, self._effects)

    async def _batches(self, stream: str) -> AsyncIterator[list[Entry]]:
        """Yield every entry of the stream like `batches`, after awaiting `before_batch` before each read."""
        await self._before_batch()
        async for entries in batches(self._bus, stream):
            yield entries
            await self._before_batch()

    async def _load_jobs(self) -> None:
        """Add the stored jobs to the world, those whose stored data cannot be parsed as far as they can be read."""
        jobs, no_record = self._world.jobs, dict[str, str]()
        for job_id, text in (await self._bus.hash_all(names.JOBS)).items():
            try:
                job = from_json(text)
            except (ValueError, ConfigError) as error:
                no_record[job_id] = text
                self._unreadable[job_id] = _Unreadable(names.JOBS, job_id, text, _describe(error))
            else:
                await self._load_job(job)
        for job_id, text in no_record.items():
            job = readable_part(job_id, text, self._now.wall)
            if not job.no or jobs.numbered(job.no):
                job.no = next(no for no in range(MAX_JOBS - 1, 0, -1) if jobs.numbered(no) is None)
            await self._load_job(job)

    async def _load_job(self, job: Job) -> None:
        audit, lengths = None, dict[str, str]()
        if not job.ended:
            counters = await self._bus.hash_get(names.job_audit(job.id), "counters")
            lengths = await self._bus.hash_all(names.job_lengths(job.id))
            try:
                audit = Audit.model_validate_json(counters) if counters else None
            except ValueError as error:
                found = _Unreadable(names.job_audit(job.id), "counters", counters or "", _describe(error))
                self._unreadable.setdefault(job.id, found)
        prompts = self._world.jobs.add(job, audit).progress.lengths.prompts
        for prompt, length in lengths.items():
            try:
                prompts[prompt] = float(length)
            except ValueError:  # an estimate
                log.warning("length_unreadable", job=job.id, prompt=prompt)

    def _fail_unreadable(self) -> None:
        """Fail the jobs whose stored data cannot be parsed; what was stored becomes a dead letter.

        The record of a job that had ended stays as it is.
        """
        for job_id, (key, name, text, cause) in self._unreadable.items():
            job = self._world.jobs[job_id]
            reason = (
                f"field {name} of the hash {key} in Redis cannot be parsed ({cause}): another version of rlboost "
                "wrote it, or it is damaged"
            )
            if job.record.ended:
                job.record.error = reason
                log.error("job_unreadable", job=job_id, reason=reason)
                continue
            reason += (
                "; it is kept among the dead letters. To continue, run the job's file again with trainer.resume set "
                "to the folder of its run, which has its newest checkpoint"
            )
            log.error("job_unreadable", job=job_id, reason=reason)
            report_dead_letter(key, name, reason)
            body = text.encode(errors="surrogateescape")  # the stored bytes: the bus decodes them so
            letter = dead_letter_op(key, name, "manager", reason, body, self._now.wall)
            self._effects.append(Store((letter,)))
            self._effects += enter_state(self._world, job, "failed", self._now, reason)
            if self._stop_trainer:
                self._effects.append(Store((self._stop_trainer(job.record),)))

    async def _load_workers(self) -> None:
        for worker_id, text in (await self._bus.hash_all(names.FLEET)).items():
            try:
                self._world.fleet.join(WorkerJoined.model_validate_json(text), self._now.mono)
            except ValueError as error:
                # At its next heartbeat the worker is dismissed as unknown, and joins again.
                log.warning("worker_unreadable", worker=worker_id, reason=_describe(error))

    async def _load_delivered(self, job: JobEntry) -> None:
        def apply(entry: Entry) -> list[Effect]:
            apply_delivered(job.progress, entry.message)
            return []

        async for entries in self._batches(names.rollouts_finished(job.id)):
            for entry, error in apply_each(entries, apply, self._poison).invalid:
                log.error("delivered_entry_unapplied", stream=entry.stream, entry=entry.id, reason=str(error))

    async def _load_committed_versions(self) -> None:
        async for entries in self._batches(names.WEIGHTS_COMMITTED):
            for message in (entry.message for entry in entries):
                if isinstance(message, WeightsCommitted):
                    self._world.jobs.on_committed(message.job_id, message.version, message.base)
        # A job's other models have one version each, committed before its own first: the stream may have lost them.
        for job in self._world.jobs.active():
            if job.served_for and self._world.jobs.committed_version(job.served_for) >= 0:
                self._world.jobs.on_committed(job.id, 0, job.progress.base)

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
        applied = apply_in_batches(
            entries,
            lambda frames: apply_frames(self._world, frames, counted=counted),
            lambda entry: apply_record(self._world, entry.message, entry.id, counted=counted),
            self._poison,
        )
        # Those that are not counted were dead-lettered when they were read first.
        self._effects += with_dead_letters(applied, self._now) if counted else applied.effects

    def _reattach_samples(self) -> None:
        """Return samples to their workers, unassign those of lost workers, and restart windows that were open."""
        world, now = self._world, self._now.mono
        owned: dict[str, list[Sample]] = {worker_id: [] for worker_id in world.fleet.workers}
        for sample in list(world.ledger.samples.values()):
            if sample.worker in owned:
                owned[sample.worker].append(sample)
            elif sample.worker:
                unassign(world.fleet, world.queues, sample)
        for worker_id, samples in owned.items():
            world.fleet.workers[worker_id].set_samples(samples)
        for job in world.jobs.active():
            window = job.progress.window
            if window and window.phase == "open" and world.ledger.samples:
                window.on_placed(now)
        world.fleet.reset_liveness(now)


def restore_lost_jobs(world: World, before: World, now: Now) -> list[Effect]:
    """Add the jobs that Redis has lost to a world that was rebuilt from it.

    Their records are all that is left: those that had not ended fail, with how to continue them.
    """
    effects: list[Effect] = []
    lost = [job.record for job in before.jobs.values() if job.id not in world.jobs]
    reason = "its data are older than what this manager has written"
    log.error("redis_lost_data", jobs=[job.id for job in lost], reason=reason)
    for job in lost:
        entry = world.jobs.add(job)
        error = (
            f"Redis has lost its data, and with it this job, which had completed {job.step} steps: run its job file "
            "again with trainer.resume set to the folder of its run, which has its newest checkpoint. Find out why "
            "Redis was emptied or restarted from an older file; access tokens and fleet sizes are lost too"
        )
        effects += [*enter_state(world, entry, "failed", now, error), save_job(job)]
    return effects


def _describe(error: Exception) -> str:
    return "; ".join(describe(error)) if isinstance(error, ValidationError) else str(error)


async def batches(bus: Bus, stream: str) -> AsyncIterator[list[Entry]]:
    """Yield every entry of the stream, at most `MAX_BATCH` at a time."""
    cursor, size = START, ReadSize(MAX_BATCH)
    while entries := await bus.read({stream: cursor}, count=size.count):
        size.update(entries)
        cursor = entries[-1].id
        yield entries
