"""Handing out samples that wait, and evening out the load of those that run."""

from __future__ import annotations

from collections.abc import Iterable

from services.rollout_manager.domain.balance import Load, Running, moves
from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.ledger import Sample
from services.rollout_manager.domain.needs import Need, common_of, kv_of, limit_of, revoke
from services.rollout_manager.domain.placement import best_of, has_room, holders, roomier
from services.rollout_manager.domain.trials import taker
from services.rollout_manager.domain.world import Now, World
from shared.columns import U32, U64, pack
from shared.ids import is_served
from shared.messages import Assign, Assignment, Placed, Release

BALANCE_EVERY_S = 0.2
"""How often loads are compared while nothing waits."""
LONG_ASIDE = 8
"""So many samples at most wait in a turn for a larger KV cache while others are placed: looking at each costs time."""
RELEASE_LIMIT_S = 5.0
"""A worker that was asked for a sample and has not handed it back for so long is not waited for any more."""


def place(world: World, now: Now) -> None:
    """Give samples that wait to workers with room: clients' first, since somebody looks on, then the oldest step's."""
    for need in sorted(world.waiting, key=lambda need: (not need.serves, need.version, need.job_id)):
        _place(world, need, now)


def _place(world: World, need: Need, now: Now) -> None:
    waiting = world.waiting[need]
    pools = world.pools(need)
    chosen: dict[str, dict[int, Sample]] = {}
    aside: list[Sample] = []
    n_long = 0
    while n_long < LONG_ASIDE and (worker_id := best_of(pools)) is not None:
        sample_id = waiting.pop(world.waits)
        if sample_id is None:
            break
        sample = world.ledger.samples[sample_id]
        limit = limit_of(sample)
        if sample.failed_on:
            worker = taker(sample, holders(limit, pools, world.fleet.workers), world.ledger.samples)
        else:
            worker = world.fleet.workers[_near(world, need, sample) or worker_id]
            worker = roomier(worker, limit, pools, world.fleet.workers)
            n_long += worker is None
        if worker is None:
            aside.append(sample)
            continue
        # Its owner is noted at once: a sample that stands twice among the waiting is placed once.
        sample.worker, sample.placed_at = worker.id, now.mono
        chosen.setdefault(worker.id, {})[sample_id] = sample
        if worker.kv_page_tokens and not worker.samples.isdisjoint(_group_of(sample)):
            worker.kv_common += common_of(sample, worker.kv_page_tokens)
        worker.samples.add(sample_id)
        worker.kv_held += kv_of(sample)
        worker.longest = max(worker.longest, limit)
        world.offer(worker.id)
    for sample in aside:
        world.wait(sample)
    if not need.serves:
        _note_stall(world, need, stalled=not waiting.empty and not any(pool.members for pool in pools), now=now)
    if waiting.empty:
        del world.waiting[need]
    for worker_id, samples in chosen.items():
        _assign(world, world.fleet.workers[worker_id], list(samples.values()), now)


def _group_of(sample: Sample) -> range:
    return range(sample.request.group, sample.request.group + sample.request.n)


def _near(world: World, need: Need, sample: Sample) -> str:
    """Return the worker that a new sample had better go to, if that is there and has room."""
    worker = world.fleet.workers.get(sample.request.near)
    if worker is None or sample.attempt or not has_room(worker):
        return ""
    return worker.id if worker.serves(need.job_id, need.oldest, need.version) else ""


def _note_stall(world: World, need: Need, *, stalled: bool, now: Now) -> None:
    if not stalled:
        world.stalled_since.pop(need.job_id, None)
    elif need.oldest <= world.committed.get(need.job_id, -1):
        world.stalled_since.setdefault(need.job_id, now.wall)


def _assign(world: World, worker: Worker, samples: list[Sample], now: Now) -> None:
    message = Placed(
        worker=worker.id,
        samples=pack([sample.id for sample in samples], U64),
        attempts=pack([sample.attempt + 1 for sample in samples], U32),
        offsets=pack([sample.n_tokens for sample in samples], U32),
    )
    moved = [sample for sample in samples if sample.attempt]
    job_id = samples[0].request.job_id
    if moved:
        worker.disturbed_at = now.mono
        tokens = sum(sample.n_tokens for sample in moved)
        audit = world.audits[job_id]
        audit.migrations += len(moved)
        audit.tokens_saved += tokens
        world.tell("samples_moved", now, job_id, worker=worker.id, samples=len(moved), tokens=tokens)
    world.ledger.place(message)
    world.record(message)
    assignments = [_assignment(sample) for sample in samples]
    world.send(worker, Assign(job_id=job_id, version=worker.version, samples=assignments))
    window = world.windows.get(job_id)
    if window is not None and not is_served(samples[0].id):
        window.placed(now.mono)


def _assignment(sample: Sample) -> Assignment:
    return Assignment(
        sample=sample.id,
        attempt=sample.attempt,
        prompt=sample.request.prompt,
        tokens=bytes(sample.tokens),
        sampling=sample.request.sampling,
        seed=(sample.request.seed + sample.id) & 0x7FFF_FFFF_FFFF_FFFF,
    )


# --- evening out ------------------------------------------------------------------------------------------------------


def balance(world: World, now: Now) -> None:
    """Ask workers for samples that would end sooner elsewhere (paper, algorithm 2, continuous balancing)."""
    if now.mono - world.balanced_at < BALANCE_EVERY_S:
        return
    world.balanced_at = now.mono
    releasing = _give_up_on_the_silent(world, now)
    for serving, workers in world.serving().items():
        # What is on its way is not counted anywhere yet: it is placed first, then loads are compared again.
        waits = any(need.job_id == serving[0] and need.oldest <= serving[1] for need in world.waiting)
        if len(workers) > 1 and not waits and not any(worker.id in releasing for worker in workers):
            loads = [_load_of(world, worker, now) for worker in workers]
            for worker_id, sample_ids in moves([load for load in loads if load.profile.known]).items():
                ask_back(world, world.fleet.workers[worker_id], sample_ids, now)


def _load_of(world: World, worker: Worker, now: Now) -> Load:
    profile = worker.profile if worker.profile.known else world.fleet.borrowed
    return Load(
        worker=worker.id,
        batch=max(1, worker.at_once()),
        load=len(worker.samples),
        tokens=worker.kv_held,
        profile=profile,
        speed=worker.speed,
        running=lambda: _running(world, worker, now),
    )


def _running(world: World, worker: Worker, now: Now) -> Iterable[Running]:
    lengths = world.lengths[worker.job_id]
    for sample_id in sorted(worker.samples):
        sample = world.ledger.samples[sample_id]
        if not sample.finish:
            yield Running(
                id=sample_id,
                rest=lengths.rest(sample),
                tokens=kv_of(sample),
                begun=sample.n_tokens > 0,
                there_s=now.mono - sample.placed_at,
            )


def ask_back(world: World, worker: Worker, sample_ids: list[int], now: Now) -> None:
    """Ask a worker for samples; they go on elsewhere once it has handed them back."""
    samples = [world.ledger.samples[i] for i in sample_ids]
    for sample in samples:
        worker.releasing[sample.id] = now.mono
    world.changed(worker)
    world.send(
        worker,
        Release(
            samples=pack([sample.id for sample in samples], U64),
            attempts=pack([sample.attempt for sample in samples], U32),
        ),
    )
    job_id, tokens = samples[0].request.job_id, sum(sample.n_tokens for sample in samples)
    world.tell("samples_asked_back", now, job_id, worker=worker.id, samples=len(samples), tokens=tokens)


def _give_up_on_the_silent(world: World, now: Now) -> set[str]:
    """Take from workers what they do not hand back; return the workers that still may."""
    waited_for = set()
    for worker in world.fleet.workers.values():
        for sample_id, since in list(worker.releasing.items()):
            if now.mono - since > RELEASE_LIMIT_S:
                sample = world.ledger.samples[sample_id]
                world.send(worker, revoke(sample))
                world.orphan(sample)
        if worker.releasing:
            waited_for.add(worker.id)
    return waited_for
