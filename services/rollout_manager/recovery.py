"""Rebuilds the manager's world from Redis, at the start and after a write whose reply was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.domain.apply_messages import (
    apply_delivered,
    apply_frames,
    apply_message,
    apply_record,
)
from rlboost.services.rollout_manager.domain.effects import ClearQuarantine, DeadLetterEntry
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.record import Job, QuarantinedJob, from_json
from rlboost.services.rollout_manager.domain.quarantine import detach_samples
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.services.rollout_manager.entry_batches import (
    Invalid,
    PoisonEntries,
    PoisonFound,
    apply_each,
    apply_in_batches,
)
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import WeightsCommitted, WorkerJoined
from rlboost.shared.progress import CountProgress
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.dead_letters import report_dead_letter
from rlboost.shared.streams.entries import START, Entry, position
from rlboost.shared.streams.read_size import ReadSize
from rlboost.shared.validation import describe

log = structlog.get_logger(__name__)

SHARED_STREAMS = (
    names.JOB_COMMANDS,
    names.JOB_REPORTS,
    names.WEIGHTS_COMMITTED,
    names.TOKEN_LOG,
    names.WORKER_HEARTBEATS,
)
"""Streams that are read for all jobs, in the order in which entries of one batch are applied."""
BeforeBatch = Callable[[], Awaitable[None]]
"""Awaited before each batch of entries is read: a long recovery must renew the leader's lease."""
MAX_BATCH = 256
"""Maximum number of entries that one read takes; fewer where they are large: see `ReadSize`."""


async def _do_nothing() -> None:
    """Do nothing before a batch."""


@dataclass(slots=True)
class Recovered:
    """A world, and the position in each stream up to which it is complete."""

    world: World
    cursors: dict[str, str] = field(default_factory=dict)


async def recover(
    bus: Bus,
    lease_s: float,
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
        lease_s: how long a worker may be silent.
        now: the present time.
        poison: the entries that cannot be applied; those found here are added.
        before_batch: awaited before each batch of entries is read.
        replayed: updated with the number of entries of the token log that were replayed.

    """
    replayed = replayed or CountProgress("entries")
    while True:
        try:
            return await _rebuild(bus, lease_s, now, poison, before_batch, replayed)
        except PoisonFound as found:
            log.warning("recovery_restarted", reason=str(found))


async def _rebuild(
    bus: Bus, lease_s: float, now: Now, poison: PoisonEntries, before_batch: BeforeBatch, replayed: CountProgress
) -> Recovered:
    world = World(lease_s)
    stored = await bus.hash_all(names.MANAGER_CURSORS)
    for job_id, text in (await bus.hash_all(names.JOBS)).items():
        await _load_job(bus, world, job_id, text, now)
    for worker_id, text in (await bus.hash_all(names.FLEET)).items():
        try:
            world.fleet.join(WorkerJoined.model_validate_json(text), now.mono)
        except ValueError as error:
            # At its next heartbeat the worker is dismissed as unknown, and joins again.
            log.warning("worker_unreadable", worker=worker_id, reason=_describe(error))
    for job in world.jobs.active():
        await _recall_delivered(bus, world, job, poison, before_batch)
    active = {job.id for job in world.jobs.active()}
    for entry in await read_all(bus, names.WEIGHTS_COMMITTED, before_batch):
        if isinstance(entry.message, WeightsCommitted) and entry.message.job_id in active:
            progress = world.progress[entry.message.job_id]
            progress.committed_version = max(entry.message.version, progress.committed_version)
    cursors = {stream: stored.get(stream, START) for stream in SHARED_STREAMS}
    n_entries = await _replay_log(bus, world, cursors, poison, before_batch, replayed)
    _reattach_samples(world, now)
    for job in world.jobs.active():
        await _apply_quarantined(bus, world, job, now, poison, before_batch)
    for job in world.jobs.active():
        stream = names.rollouts_requested(job.id)
        cursors[stream] = stored.get(stream, START)
    log.info("world_recovered", log_entries=n_entries, samples=len(world.ledger.samples), jobs=len(world.jobs))
    return Recovered(world, cursors)


async def _load_job(bus: Bus, world: World, job_id: str, text: str, now: Now) -> None:
    """Add a job to the world; quarantine it if any of its stored data cannot be parsed."""
    source = f"field {job_id} of the hash {names.JOBS} in Redis"
    audit, lengths = None, dict[str, float]()
    try:
        job = from_json(text)
        if not job.ended:
            source = f"the hash {names.job_audit(job.id)} in Redis"
            if counters := await bus.hash_get(names.job_audit(job.id), "counters"):
                audit = Audit.model_validate_json(counters)
            source = f"the hash {names.job_lengths(job.id)} in Redis"
            stored = await bus.hash_all(names.job_lengths(job.id))
            lengths = {prompt: float(length) for prompt, length in stored.items()}
    except (ValueError, ConfigError) as error:
        _quarantine(world, job_id, text, f"{source} cannot be parsed ({_describe(error)})", now)
        return
    world.jobs[job.id] = job
    if audit is not None:
        world.audits[job.id] = audit
    world.progress[job.id].lengths.prompts.update(lengths)


def _quarantine(world: World, job_id: str, text: str, cause: str, now: Now) -> None:
    reason = (
        f"quarantined: {cause}. The job's data are unchanged: start the version of rlboost that wrote them, or repair "
        "them in Redis and restart the rollout manager"
    )
    job = world.quarantined[job_id] = QuarantinedJob.from_text(job_id, text, reason)
    log.error("job_quarantined", job=job_id, reason=reason)
    if not job.had_ended:
        world.emit_event("job_quarantined", now, job_id, reason=reason)


def _describe(error: Exception) -> str:
    return "; ".join(describe(error)) if isinstance(error, ValidationError) else str(error)


async def _recall_delivered(bus: Bus, world: World, job: Job, poison: PoisonEntries, before_batch: BeforeBatch) -> None:
    async for entries in batches(bus, names.rollouts_finished(job.id), before_batch):
        for entry, error in apply_each(entries, lambda entry: apply_delivered(world, job.id, entry.message), poison):
            log.error("delivered_entry_unapplied", stream=entry.stream, entry=entry.id, reason=str(error))


async def _apply_quarantined(
    bus: Bus, world: World, job: Job, now: Now, poison: PoisonEntries, before_batch: BeforeBatch
) -> None:
    """Apply the messages about a job that an earlier manager stored while the job was quarantined."""
    entries = await read_all(bus, names.job_quarantine(job.id), before_batch)
    invalid = apply_each(entries, lambda entry: apply_message(world, entry.message, entry.id, now), poison)
    dead_letter(world, invalid)
    if entries:
        world.outbox.add(ClearQuarantine(job.id))


async def _replay_log(
    bus: Bus,
    world: World,
    cursors: dict[str, str],
    poison: PoisonEntries,
    before_batch: BeforeBatch,
    replayed: CountProgress,
) -> int:
    """Replay the whole token log and move its cursor to the end; return the number of entries."""
    counted_to = position(cursors[names.TOKEN_LOG])
    n_entries, total = 0, await bus.length(names.TOKEN_LOG)
    replayed.update(n_entries, total)
    async for entries in batches(bus, names.TOKEN_LOG, before_batch):
        for counted, batch in groupby(entries, key=lambda entry: position(entry.id) > counted_to):
            _replay(world, batch, poison, counted=counted)
        cursors[names.TOKEN_LOG] = entries[-1].id
        n_entries += len(entries)
        replayed.update(n_entries, max(n_entries, total))
    return n_entries


async def batches(bus: Bus, stream: str, before_batch: BeforeBatch = _do_nothing) -> AsyncIterator[list[Entry]]:
    """Yield every entry of the stream, at most `MAX_BATCH` at a time; `before_batch` is awaited before each read."""
    cursor, size = START, ReadSize(MAX_BATCH)
    while True:
        await before_batch()
        if not (entries := await bus.read({stream: cursor}, count=size.count)):
            return
        size.update(entries)
        cursor = entries[-1].id
        yield entries


async def read_all(bus: Bus, stream: str, before_batch: BeforeBatch = _do_nothing) -> list[Entry]:
    """Return every entry of a short stream."""
    return [entry async for entries in batches(bus, stream, before_batch) for entry in entries]


def _replay(world: World, entries: Iterable[Entry], poison: PoisonEntries, *, counted: bool) -> None:
    invalid = apply_in_batches(
        entries,
        lambda frames: apply_frames(world, frames, counted=counted),
        lambda entry: apply_record(world, entry.message, entry.id, counted=counted),
        poison,
    )
    if counted:  # the others were dead-lettered when they were read first
        dead_letter(world, invalid)


def dead_letter(world: World, invalid: Invalid) -> None:
    """Append invalid entries to the dead letters, in one transaction with the position after them."""
    for entry, error in invalid:
        report_dead_letter(entry.stream, entry.id, str(error))
        world.outbox.add(DeadLetterEntry(entry.stream, entry.id, entry.message, str(error)))


def _reattach_samples(world: World, now: Now) -> None:
    """Return samples to their workers, unassign those of lost workers, and restart windows that were open."""
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
            progress.window.on_placed(now.mono)
    detach_samples(world)
    world.fleet.reset_liveness(now.mono)
