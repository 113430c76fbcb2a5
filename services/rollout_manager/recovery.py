"""From Redis to a world: what a manager does when it starts, and when it no longer knows whether a write took place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import groupby

import structlog

from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.intake import fold, recall_delivered, take_frames
from services.rollout_manager.domain.jobs import Job, from_json
from services.rollout_manager.domain.world import Now, World
from services.rollout_manager.runs import apply
from shared import names
from shared.bus import START, Bus, Entry, position
from shared.messages import WeightsCommitted, WorkerJoined

log = structlog.get_logger(__name__)

SHARED_STREAMS = (
    names.JOB_COMMANDS,
    names.JOB_REPORTS,
    names.WEIGHTS_COMMITTED,
    names.TOKEN_LOG,
    names.WORKER_BEATS,
)
"""Streams that are always read, in the order in which entries of one batch are applied."""
ENTRIES_AT_ONCE = 256
"""An entry is a frame or a whole sample: a batch of them is some MiB, however much the stream holds."""


@dataclass(slots=True)
class Recovered:
    """A world and the position in each stream up to which it knows everything."""

    world: World
    cursors: dict[str, str] = field(default_factory=dict)


async def recover(bus: Bus, lease_s: float, now: Now) -> Recovered:
    """Rebuild the world.

    The token log is folded from its oldest entry: silently up to the stored cursor, and counted behind it. Nothing is
    decided before its end is reached, since a later record may show that a decision was taken already.
    """
    world = World(lease_s)
    stored = await bus.hash_all(names.MANAGER_CURSORS)
    for text in (await bus.hash_all(names.JOBS)).values():
        world.add_job(from_json(text))
    for text in (await bus.hash_all(names.FLEET)).values():
        world.fleet.join(WorkerJoined.model_validate_json(text), now.mono)
    for job in world.active_jobs():
        await _recall(bus, world, job)
    active = {job.id for job in world.active_jobs()}
    for entry in await read_all(bus, names.WEIGHTS_COMMITTED):
        if isinstance(entry.message, WeightsCommitted) and entry.message.job_id in active:
            newest = max(entry.message.version, world.committed.get(entry.message.job_id, -1))
            world.committed[entry.message.job_id] = newest
    cursors = {stream: stored.get(stream, START) for stream in SHARED_STREAMS}
    folded = await _fold_log(bus, world, cursors)
    _settle(world, now)
    for job in world.active_jobs():
        stream = names.rollouts_requested(job.id)
        cursors[stream] = stored.get(stream, START)
    log.info("world_recovered", log_entries=folded, samples=len(world.ledger.samples), jobs=len(world.jobs))
    return Recovered(world, cursors)


async def _recall(bus: Bus, world: World, job: Job) -> None:
    if counters := await bus.hash_get(names.job_audit(job.id), "counters"):
        world.audits[job.id] = Audit.model_validate_json(counters)
    lengths = await bus.hash_all(names.job_lengths(job.id))
    world.lengths[job.id].prompts.update({prompt: float(length) for prompt, length in lengths.items()})
    async for entries in batches(bus, names.rollouts_finished(job.id)):
        for entry in entries:
            recall_delivered(world, job.id, entry.message)


async def _fold_log(bus: Bus, world: World, cursors: dict[str, str]) -> int:
    """Fold the whole token log and move its cursor to the end; return how many entries it has."""
    known_to = position(cursors[names.TOKEN_LOG])
    folded = 0
    async for entries in batches(bus, names.TOKEN_LOG):
        for counted, part in groupby(entries, key=lambda entry: position(entry.id) > known_to):
            _fold(world, part, counted=counted)
        cursors[names.TOKEN_LOG] = entries[-1].id
        folded += len(entries)
    return folded


async def batches(bus: Bus, stream: str) -> AsyncIterator[list[Entry]]:
    """Yield every entry that the stream holds, a bounded number at a time."""
    cursor = START
    while entries := await bus.read({stream: cursor}, count=ENTRIES_AT_ONCE):
        cursor = entries[-1].id
        yield entries


async def read_all(bus: Bus, stream: str) -> list[Entry]:
    """Return every entry of a stream that is never long."""
    return [entry async for entries in batches(bus, stream) for entry in entries]


def _fold(world: World, entries: Iterable[Entry], *, counted: bool) -> None:
    unusable = apply(
        entries,
        lambda frames: take_frames(world, frames, counted=counted),
        lambda entry: fold(world, entry.message, entry.id, counted=counted),
    )
    for entry, error in unusable:
        log.warning("log_entry_unusable", entry=entry.id, reason=str(error))


def _settle(world: World, now: Now) -> None:
    """Give each worker its samples, let those wait whose owner is gone, and begin windows anew that were open."""
    for sample in list(world.ledger.samples.values()):
        if owner := world.fleet.workers.get(sample.worker):
            owner.samples.add(sample.id)
        elif sample.worker:
            world.orphan(sample)
    for window in world.windows.values():
        if window.phase == "open" and world.ledger.samples:
            window.placed(now.mono)
    world.fleet.give_everyone_time(now.mono)
