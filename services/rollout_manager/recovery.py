"""From Redis to a world: what a manager does when it starts, and when it no longer knows whether a write took place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import groupby

import structlog
from pydantic import ValidationError

from services.rollout_manager.domain.actions import ForgetKept
from services.rollout_manager.domain.aside import freeze
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.intake import fold, recall_delivered, take, take_frames
from services.rollout_manager.domain.jobs import AsideJob, Job, from_json
from services.rollout_manager.domain.world import Now, World
from services.rollout_manager.runs import apply
from shared import names
from shared.bus import START, Bus, Entry, position
from shared.errors import ConfigError
from shared.messages import WeightsCommitted, WorkerJoined
from shared.validation import describe

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
    for job_id, text in (await bus.hash_all(names.JOBS)).items():
        await _know(bus, world, job_id, text, now)
    for worker_id, text in (await bus.hash_all(names.FLEET)).items():
        try:
            world.fleet.join(WorkerJoined.model_validate_json(text), now.mono)
        except ValueError as error:
            # As soon as it is heard it is told that nobody knows it, and joins anew.
            log.warning("worker_unreadable", worker=worker_id, reason=_words(error))
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
        await _take_kept(bus, world, job, now)
    for job in world.active_jobs():
        stream = names.rollouts_requested(job.id)
        cursors[stream] = stored.get(stream, START)
    log.info("world_recovered", log_entries=folded, samples=len(world.ledger.samples), jobs=len(world.jobs))
    return Recovered(world, cursors)


async def _know(bus: Bus, world: World, job_id: str, text: str, now: Now) -> None:
    """Add a job to the world, or set it aside if anything that is stored of it cannot be read."""
    what = f"field {job_id} of the hash {names.JOBS} in Redis"
    audit, lengths = None, dict[str, float]()
    try:
        job = from_json(text)
        if not job.ended:
            what = f"the hash {names.job_audit(job.id)} in Redis"
            if counters := await bus.hash_get(names.job_audit(job.id), "counters"):
                audit = Audit.model_validate_json(counters)
            what = f"the hash {names.job_lengths(job.id)} in Redis"
            stored = await bus.hash_all(names.job_lengths(job.id))
            lengths = {prompt: float(length) for prompt, length in stored.items()}
    except (ValueError, ConfigError) as error:
        _set_aside(world, job_id, text, f"{what} cannot be read ({_words(error)})", now)
        return
    world.add_job(job)
    if audit is not None:
        world.audits[job.id] = audit
    world.lengths[job.id].prompts.update(lengths)


def _set_aside(world: World, job_id: str, text: str, why: str, now: Now) -> None:
    reason = (
        f"set aside: {why}. Nothing of the job is changed: start the version of rlboost that wrote it, or mend what "
        "Redis has there and start the rollout manager again"
    )
    job = world.aside[job_id] = AsideJob.of(job_id, text, reason)
    log.error("job_set_aside", job=job_id, reason=reason)
    if not job.had_ended:
        world.tell("job_set_aside", now, job_id, reason=reason)


def _words(error: Exception) -> str:
    return "; ".join(describe(error)) if isinstance(error, ValidationError) else str(error)


async def _recall(bus: Bus, world: World, job: Job) -> None:
    async for entries in batches(bus, names.rollouts_finished(job.id)):
        for entry in entries:
            recall_delivered(world, job.id, entry.message)


async def _take_kept(bus: Bus, world: World, job: Job, now: Now) -> None:
    """Take in what was said of a job while a manager that could not read it had set it aside."""
    entries = await read_all(bus, names.job_kept(job.id))
    for entry in entries:
        take(world, entry.message, entry.id, now)
    if entries:
        world.actions.append(ForgetKept(job.id))


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
    freeze(world)
    world.fleet.give_everyone_time(now.mono)
