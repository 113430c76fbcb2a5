"""What the manager decides once everything that was there to read has been read.

Called after every batch of messages and on every tick; deciding twice on the same world decides nothing the second
time.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.intake import lose_worker
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.ledger import FAILURE_LIMIT, Sample
from services.rollout_manager.domain.placement import capacity, place
from services.rollout_manager.domain.seeding import View
from services.rollout_manager.domain.world import Need, Now, World
from shared.bus import position
from shared.columns import U32, U64, pack
from shared.messages import (
    Assign,
    Assignment,
    Placed,
    Resume,
    SeedingEnded,
    SeedingReopened,
    Suspend,
    UseVersion,
)

MIN_LOG_TOKENS = 1 << 20
"""The log is not compacted below this many tokens."""
MAX_LOG_RATIO = 4
"""The log is compacted when it holds so many times the tokens in flight."""
RESTATE_AT_ONCE = 64


def decide(world: World, now: Now, dead: Iterable[str] = ()) -> None:
    """Act on the world as it stands.

    Args:
        world: changed in place; what is to be done is left in its actions.
        now: this moment.
        dead: suspects whose lease has run out.

    """
    for worker_id in dead:
        if worker := world.fleet.workers.get(worker_id):
            lose_worker(world, worker, now)
    _finish(world)
    for job in world.active_jobs():
        _advance_window(world, job, now)
    target = _target(world)
    for worker in world.fleet.workers.values():
        _set_version(world, worker, target)
        _set_active(world, worker, target)
    for need in world.waiting_needs():
        _place(world, need, now)


def _finish(world: World) -> None:
    for sample_id in list(world.ledger.finished):
        world.deliver(world.ledger.samples[sample_id])
    for sample_id, reason in list(world.ledger.failed.items()):
        sample = world.ledger.samples[sample_id]
        if sample.failures >= FAILURE_LIMIT:
            world.drop(sample, f"failed {sample.failures} times: {reason}")
        elif sample.worker:
            world.orphan(sample)


# --- the seeding window -----------------------------------------------------------------------------------------------


def _advance_window(world: World, job: Job, now: Now) -> None:
    window = world.windows.get(job.id)
    if window is None:
        return
    match window.advance(_view(world, job, now)):
        case "close":
            world.tell("seeding_closing", now, job.id, step=window.step, reason=window.reason)
        case "end":
            length_s = window.length_so_far(now.mono)
            message = SeedingEnded(step=window.step, window_s=length_s, reason=window.reason)
            world.deliver_message(job.id, message)
            world.tell("seeding_ended", now, job.id, step=window.step, window_s=length_s, reason=window.reason)
        case "reopen":
            world.deliver_message(job.id, SeedingReopened(step=window.step))
            world.tell("seeding_reopened", now, job.id, step=window.step)


def _view(world: World, job: Job, now: Now) -> View:
    live = {need: n for need, n in world.live.items() if need[0] == job.id}
    reserved, preemptible = world.fleet.present(reserved=True), world.fleet.present(reserved=False)
    return View(
        now=now.mono,
        live=sum(live.values()),
        reserved=len(reserved),
        reserved_awake=sum(1 for worker in reserved if worker.state != "suspended"),
        preemptible=len(preemptible),
        preemptible_ready=sum(1 for worker in preemptible if any(worker.serves(*need) for need in live)),
    )


# --- what each worker should be doing ---------------------------------------------------------------------------------


def _target(world: World) -> Need | None:
    """Return the job and version that the fleet serves: the oldest active job's, the version that its samples need."""
    for job in world.active_jobs():
        needed = [version for (job_id, version), n in world.live.items() if job_id == job.id and n]
        version = min(needed, default=world.committed.get(job.id, -1))
        if version >= 0 and version <= world.committed.get(job.id, -1):
            return job.id, version
    return None


def _set_version(world: World, worker: Worker, target: Need | None) -> None:
    if target is None or worker.told_version == target or worker.state == "draining":
        return
    worker.told_version = target
    world.send(worker, UseVersion(job_id=target[0], version=target[1]))


def _set_active(world: World, worker: Worker, target: Need | None) -> None:
    if not worker.reserved or not worker.known or worker.state == "draining":
        return
    window = world.windows.get(target[0]) if target else None
    active = window is not None and window.phase == "open"
    if worker.told_active is active:
        return
    window_step = max((window.step for window in world.windows.values()), default=0)
    worker.told_active = active
    world.send(worker, Resume(step=window_step) if active else Suspend(step=window_step))


# --- placement --------------------------------------------------------------------------------------------------------


def _place(world: World, need: Need, now: Now) -> None:
    job_id, version = need
    candidates = [
        worker
        for worker in world.fleet.workers.values()
        if worker.serves(job_id, version) and worker.told_active is not False
    ]
    room = sum(max(0, capacity(worker) - len(worker.samples)) for worker in candidates)
    if room == 0:
        if candidates:
            world.stalled_since.pop(job_id, None)
        else:
            world.stalled_since.setdefault(job_id, now.wall)
        return
    world.stalled_since.pop(job_id, None)
    samples = {sample.id: sample for sample in world.waiting(need, room)}
    for worker_id, chosen in place(list(samples), candidates).items():
        _assign(world, world.fleet.workers[worker_id], [samples.pop(i) for i in chosen], now)
    for sample in samples.values():
        world.wait(sample)


def _assign(world: World, worker: Worker, samples: list[Sample], now: Now) -> None:
    message = Placed(
        worker=worker.id,
        samples=pack([sample.id for sample in samples], U64),
        attempts=pack([sample.attempt + 1 for sample in samples], U32),
        offsets=pack([sample.n_tokens for sample in samples], U32),
    )
    for sample in samples:
        if sample.attempt:
            audit = world.audits[sample.request.job_id]
            audit.migrations += 1
            audit.tokens_saved += sample.n_tokens
    moved = [sample for sample in samples if sample.attempt]
    world.ledger.place(message)
    worker.samples.update(sample.id for sample in samples)
    world.record(message)
    job_id, version = samples[0].request.job_id, samples[0].request.version
    world.send(worker, Assign(job_id=job_id, version=version, samples=[_assignment(sample) for sample in samples]))
    if window := world.windows.get(job_id):
        window.placed(now.mono)
    if moved:
        tokens = sum(sample.n_tokens for sample in moved)
        world.tell("samples_moved", now, job_id, worker=worker.id, samples=len(moved), tokens=tokens)


def _assignment(sample: Sample) -> Assignment:
    return Assignment(
        sample=sample.id,
        attempt=sample.attempt,
        prompt=sample.request.prompt,
        tokens=bytes(sample.tokens),
        sampling=sample.request.sampling,
        seed=(sample.request.seed + sample.id) & 0x7FFF_FFFF_FFFF_FFFF,
    )


# --- keeping the log short --------------------------------------------------------------------------------------------


def compact(world: World, read_to: str) -> str:
    """Restate the oldest samples when the log is long; return the oldest entry that a replay needs.

    Amortised, the log carries each token a bounded number of times: a sample is written again only after the log has
    grown by `MAX_LOG_RATIO` times all tokens in flight.
    """
    ledger = world.ledger
    limit = max(MIN_LOG_TOKENS, MAX_LOG_RATIO * ledger.tokens_live)
    placed_in_log = [sample for sample in ledger.samples.values() if sample.first_id]
    known = sorted(placed_in_log, key=lambda sample: (sample.first_mark, position(sample.first_id)))
    if known and ledger.tokens_in_log - known[0].first_mark > limit:
        for sample in known[:RESTATE_AT_ONCE]:
            if ledger.tokens_in_log - sample.first_mark > limit // 2 and not sample.finish:
                world.record(ledger.restated(sample))
    return known[0].first_id if known else read_to
