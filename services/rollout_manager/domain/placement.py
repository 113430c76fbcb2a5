"""Assigns queued samples to workers, and migrates running ones to balance the load."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.effects import Effect, Now, Record, Send, event
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.measurements import Profile, tokens_of
from rlboost.services.rollout_manager.domain.queue import Queues, Requirement, max_tokens_of, unassign
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Serving, Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.ids import is_served, worker_name
from rlboost.shared.messages import RESUMES_GRAMMAR, SAMPLING_OPTIONS, Assign, Assignment, Placed, Release
from rlboost.shared.wire import U32, U64, pack

# --- candidates -------------------------------------------------------------------------------------------------------
#
# Selects the worker for the next sample, once one can start it (late binding; paper, algorithm 2, SelectInstance).
#
# Samples queue at the manager until a worker can start them almost at once: a queued sample need not migrate when the
# fleet changes, and each worker gets work at the rate at which it frees slots. Among the workers with capacity, the
# best is the one where one more sample gets its tokens fastest.


PLATEAU = 0.9
"""A batch is on the plateau when it reaches this share of the best throughput."""
TURNAROUND_S = 0.15
"""From a sample's end to the first token of the next one in its slot: a flush, a turn of the manager, a command."""
KV_FILL = 0.85
"""Share of a KV cache that placement fills: samples grow after they are placed."""


def set_batch_cap(worker: Worker, mean_length: float) -> None:
    """Derive a worker's batch cap and headroom from its profile.

    Args:
        worker: changed in place.
        mean_length: recent mean of finished samples in tokens; 0 when none is known.

    """
    slots = worker.joined.slots
    tokens_each = worker.kv.held / len(worker.samples) if worker.samples else mean_length / 2
    cap = worker.profile.plateau(slots, PLATEAU, tokens_each)
    headroom = max(1, slots // 8)
    if worker.profile.known and mean_length:
        ends_per_s = worker.profile.tokens_per_s(cap, cap * tokens_each) * worker.speed / mean_length
        headroom = min(max(1, math.ceil(ends_per_s * TURNAROUND_S)), max(1, slots // 4))
    worker.batch_cap, worker.headroom = cap, headroom


def has_capacity(worker: Worker) -> bool:
    """Return True if the worker should get one more sample."""
    if worker.load >= worker.sample_limit:
        return False
    kv = worker.kv
    return not kv.capacity or kv.used <= KV_FILL * kv.capacity


def admits(worker: Worker, sample: Sample) -> bool:
    """Return True if the worker's engine accepts a sample: its maximum length, and the outputs that it asks for."""
    if sample.request.sampling.routed_experts and not worker.returns_routed_experts:
        return False
    if not supports(worker, sample):
        return False
    return not worker.max_request_tokens or max_tokens_of(sample) <= worker.max_request_tokens


def supports(worker: Worker, sample: Sample) -> bool:
    """Return True if the worker's engine supports the options of a sample; another one would refuse it."""
    sampling = sample.request.sampling
    if sampling.grammar and sample.n_tokens and RESUMES_GRAMMAR not in worker.sampling_options:
        return False  # it would release it at once
    return sampling.options <= worker.sampling_options


def least_loaded(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker with the smallest load per slot, None if there are no workers."""
    return min(workers, key=lambda worker: (worker.load / worker.joined.slots, worker.id), default=None)


class _Rank(NamedTuple):
    """A worker's rank if it got one more sample; the smallest one is the best."""

    over: int
    """How many samples it would have beyond its batch cap."""
    step_s: float
    """Duration of its decode step."""
    load: float
    """Its samples per slot."""
    worker: str


class Candidates:
    """The workers that may generate some samples, while these are placed.

    A worker's rank gets worse with each sample that it gets: the best of all earlier ranks is the best present one if
    it has not changed.

    Args:
        members: all of them, with capacity or not.
        fallback: profiles workers of an unknown kind.

    """

    def __init__(self, members: Iterable[Worker], fallback: Profile) -> None:
        self.members = list(members)
        self._fallback = fallback
        self._ranks = [(rank, worker) for worker in self.members if (rank := self._rank(worker)) is not None]
        heapq.heapify(self._ranks)

    def best(self) -> Worker | None:
        """Return the best worker, None if none has capacity."""
        while self._ranks:
            rank, worker = self._ranks[0]
            if (present := self._rank(worker)) == rank:
                return worker
            if present is None:
                heapq.heappop(self._ranks)
            else:
                heapq.heapreplace(self._ranks, (present, worker))
        return None

    def _rank(self, worker: Worker) -> _Rank | None:
        if not has_capacity(worker):
            return None
        profile = worker.profile if worker.profile.known else self._fallback
        more = worker.load + 1
        over = max(0, more - worker.batch_cap)
        step_s = profile.step_s(max(1, more - over), worker.kv.held) / worker.speed
        return _Rank(over, step_s, more / worker.joined.slots, worker.id)


# --- poison -----------------------------------------------------------------------------------------------------------
#
# Isolates poison samples: samples that fail on every worker, as opposed to those that only ran when an engine died.
#
# An engine that refuses a sample names it. An engine that dies or hangs may have been running hundreds: all of them
# are suspects. A sample that has failed on two workers goes *on trial*: it runs on a third worker, as the only sample
# on trial there, so that a further death can be blamed on it, until it is past the position of its last failure. The
# tokens of a sample depend on the sample alone, so what breaks an engine breaks the next one at the same position.
#
# A preemption or a lost lease makes no sample a suspect.


def on_trial(sample: Sample) -> bool:
    """Return True if one more failure drops the sample, and it is not past the position of the last one."""
    return sample.is_over_limit(1) and not sample.past_failure


def suspected_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that may have killed the engine they ran on: those on trial, or all if none is."""
    running = [sample for sample in samples if not sample.finish]
    return [sample for sample in running if on_trial(sample)] or running


def worker_for_retry(sample: Sample, members: Sequence[Worker]) -> Worker | None:
    """Return which of `members` retries a failed sample, one where it has not failed if possible; None to wait."""
    others = [worker for worker in members if worker_name(worker.id) not in sample.failed_on]
    if on_trial(sample):
        without_trial = [worker for worker in others or members if not any(map(on_trial, worker.samples.values()))]
        return least_loaded(filter(has_capacity, without_trial))
    return least_loaded(filter(has_capacity, others)) or least_loaded(filter(has_capacity, members))


# --- placement --------------------------------------------------------------------------------------------------------


REBALANCE_EVERY_S = 0.2
"""How often loads are compared while no sample is queued."""
MAX_POSTPONED = 8
"""Samples that one turn postpones because only workers without capacity accept their length: each costs time."""
RELEASE_LIMIT_S = 5.0
"""How long a worker may take to release a sample before the sample is revoked."""


def place_queued(world: World, now: Now) -> list[Effect]:
    """Assign queued samples to workers with capacity."""
    effects: list[Effect] = []
    if limits := fair_limits(world):
        effects += _place_in_order(world, now, limits)
    return effects + _place_in_order(world, now, {})  # what no job's share takes is anyone's


def _place_in_order(world: World, now: Now, limits: dict[str, float]) -> list[Effect]:
    effects: list[Effect] = []
    for requirement in world.queues.in_order():
        job_id = requirement.job_id
        for worker, samples in _place_queue(world, requirement, now, limits.get(job_id, math.inf)):
            effects += _send_assignments(world.jobs, worker, samples, now)
            if job_id in limits:
                limits[job_id] -= len(samples)
    return effects


def fair_limits(world: World) -> dict[str, float]:
    """Return how many more samples each job may get that shares workers with others, until each has its fair share.

    A job's share of the slots of the workers that serve it is in proportion to its weight, among the jobs there that
    have samples in flight. A job that is alone on its workers has no limit.
    """
    limits: dict[str, float] = {}
    shared = [worker for worker in world.fleet.workers.values() if worker.assigned_alongside]
    if not shared or not world.queues:
        return limits
    in_flight = {requirement.job_id for requirement in world.queues.in_flight.by_requirement}
    for worker in shared:
        jobs = [job for job_id in worker.jobs if job_id in in_flight and (job := world.jobs.get_active(job_id))]
        if len(jobs) < 2:
            continue
        weight = sum(job.record.spec.elastic.share for job in jobs)
        held = Counter(sample.request.job_id for sample in worker.samples.values())
        for job in jobs:
            share = worker.sample_limit * job.record.spec.elastic.share / weight
            limits[job.id] = limits.get(job.id, 0.0) + share - held[job.id]
    return limits


def _place_queue(world: World, requirement: Requirement, now: Now, limit: float) -> list[tuple[Worker, list[Sample]]]:
    """Assign up to `limit` queued samples of a requirement; return the workers with the samples that each got."""
    queue = world.queues[requirement]
    workers = (worker for worker in world.fleet.workers.values() if requirement.is_met_by(worker))
    candidates = Candidates(workers, world.fleet.fallback_profile)
    assigned: dict[str, list[Sample]] = {}
    postponed: list[Sample] = []
    n_too_long = n_assigned = 0
    while n_assigned < limit and n_too_long < MAX_POSTPONED and (best := candidates.best()) is not None:
        sample_id = queue.pop_next(world.ledger.is_queued)
        if sample_id is None:
            break
        sample = world.ledger.samples[sample_id]
        worker = _select_worker(world.fleet, requirement, sample, best, candidates.members)
        if worker is None:
            n_too_long += not sample.failed_on
            postponed.append(sample)
            continue
        # At once, so that a sample that was queued twice is assigned once.
        world.ledger.begin_attempt(sample, worker.id, sample.attempt + 1, sample.n_tokens, now.mono)
        assigned.setdefault(worker.id, []).append(sample)
        n_assigned += 1
        worker.add(sample)
    for sample in postponed:
        world.queues.add(sample)
    if not requirement.is_serving:
        stalled = not queue.empty and not candidates.members
        _track_stall(world.jobs, requirement, stalled=stalled, now=now)
    if queue.empty:
        del world.queues[requirement]
    return [(world.fleet.workers[worker_id], samples) for worker_id, samples in assigned.items()]


def _select_worker(
    fleet: Fleet, requirement: Requirement, sample: Sample, best: Worker, members: Sequence[Worker]
) -> Worker | None:
    """Return the worker for a sample, None to postpone it.

    A sample that no engine accepts goes to the best worker all the same: its engine reports the reason. A client's
    waits for a worker that supports its options.
    """
    if not sample.failed_on:
        prefers = sample.request.preferred_worker
        worker = (_preferred(fleet, requirement, sample) if prefers else None) or best
        if worker.id == sample.taken_from:
            worker = _another(members, worker, sample)
        if admits(worker, sample):
            return worker
    if is_served(sample.id):
        members = [worker for worker in members if supports(worker, sample)]
    admitting = [worker for worker in members if admits(worker, sample)]
    if sample.failed_on:
        return worker_for_retry(sample, admitting or members)
    if not admitting:
        return best if best in members else least_loaded(members)
    return least_loaded(filter(has_capacity, admitting))


def _another(members: Sequence[Worker], worker: Worker, sample: Sample) -> Worker:
    """Return another worker than the one that held the sample without generating it, if another one can take it."""
    others = (each for each in members if each is not worker and has_capacity(each) and admits(each, sample))
    return least_loaded(others) or worker


def _preferred(fleet: Fleet, requirement: Requirement, sample: Sample) -> Worker | None:
    """Return the worker that a new sample prefers, if it is present and has capacity."""
    worker = fleet.workers.get(sample.request.preferred_worker)
    if worker is None or sample.attempt or not has_capacity(worker):
        return None
    return worker if requirement.is_met_by(worker) else None


def _track_stall(jobs: Jobs, requirement: Requirement, *, stalled: bool, now: Now) -> None:
    progress = jobs[requirement.job_id].progress
    if not stalled:
        progress.stalled_since_unix_s = None
    elif requirement.oldest_version <= progress.committed_version and progress.stalled_since_unix_s is None:
        progress.stalled_since_unix_s = now.wall


def _send_assignments(jobs: Jobs, worker: Worker, samples: list[Sample], now: Now) -> list[Effect]:
    """Record the attempts that begin on a worker, and command it to generate them."""
    placed = Placed(
        worker=worker.id,
        samples=pack([sample.id for sample in samples], U64),
        attempts=pack([sample.attempt for sample in samples], U32),
        offsets=pack([sample.offset for sample in samples], U32),
    )
    effects: list[Effect] = [Record(placed)]
    job_id = samples[0].request.job_id
    if migrated := [sample.offset for sample in samples if sample.attempt > 1]:
        worker.disturbed_at = now.mono
        n_migrated, tokens = len(migrated), sum(migrated)
        audit = jobs[job_id].audit
        audit.migrations += n_migrated
        audit.tokens_saved += tokens
        effects.append(event("samples_migrated", now, job_id, worker=worker.id, samples=n_migrated, tokens=tokens))
    assignments = [_assignment(sample) for sample in samples]
    version = worker.serving_version(job_id)
    assert version is not None, "it met the requirement"
    effects.append(Send(worker.id, Assign(job_id=job_id, version=version, samples=assignments)))
    window = jobs[job_id].progress.window
    if window is not None and not is_served(samples[0].id):
        window.on_placed(now.mono)
    return effects


def _assignment(sample: Sample) -> Assignment:
    return Assignment(
        sample=sample.id,
        attempt=sample.attempt,
        prompt=sample.request.prompt,
        tokens=bytes(sample.tokens),
        sampling=sample.request.sampling,
        seed=(sample.request.seed + sample.id) & 0x7FFF_FFFF_FFFF_FFFF,
    )


# --- rebalance --------------------------------------------------------------------------------------------------------
#
# Selects samples to migrate while no sample is queued (paper, algorithm 2, continuous balancing).
#
# The paper migrates a sample to an idle worker, and samples beyond the batching plateau. This version weighs each
# migration: the time that the sample saves must exceed, with a margin, the cost of its prefill on the other worker.
# So samples with few remaining tokens stay.


HAND_OFF_S = 0.2
"""Time from the decision to migrate a sample to its first token on the other worker, without its prefill."""
PREFILL_SPEEDUP = 8.0
"""How many times faster prefill is than the decoding of a full batch; a cautious figure."""
MIN_GAIN_PER_COST = 2.0
"""A migration must save this many times its cost."""
DEAD_BAND = 1.2
"""A worker gives samples only if their tokens take this many times longer than they would on another worker."""
MIN_STAY_PER_COST = 20.0
"""A sample stays for this many times the cost of its migration: migrations slow workers down, which must not cause
further migrations."""
MAX_GIVERS = 8
"""Workers that give samples in one round: the next comparison is soon."""


@dataclass(frozen=True, slots=True)
class RunningSample:
    """One sample on a worker."""

    id: int
    remaining_tokens: float
    tokens: int
    """Its tokens in the KV cache, prompt included."""
    started: bool
    """True if it has tokens."""
    on_worker_s: float
    """Seconds since it was assigned to the worker."""


@dataclass(slots=True)
class WorkerLoad:
    """One worker."""

    worker: str
    batch_cap: int
    load: int
    tokens: int
    """Tokens of its samples in the KV cache."""
    profile: Profile
    speed: float
    running: Callable[[], Iterable[RunningSample]]
    """Called only where a sample may migrate."""
    limit: float = math.inf
    """How many samples it may have: see `Trust`."""

    def token_s(self, more: int = 0, tokens: int = 0) -> float:
        """Return the seconds between two tokens of a sample, with `more` samples of `tokens` in all."""
        return self.profile.token_interval_s(self.load + more, self.batch_cap, self.tokens + tokens) / self.speed

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a prefill of this many tokens, during which no other sample there gets a token."""
        return tokens / (PREFILL_SPEEDUP * self.profile.tokens_per_s(self.batch_cap, self.tokens) * self.speed)


def select_migrations(loads: Sequence[WorkerLoad]) -> dict[str, list[int]]:
    """Return which samples each worker should release so that they end sooner on another worker; changes the loads.

    The slowest workers give to the worker where one more sample would be fastest: samples without tokens first, then
    those with the most remaining tokens, until no migration pays.
    """
    receivers = [(load.token_s(1), load.worker, load) for load in loads if load.load < load.limit]
    heapq.heapify(receivers)
    released: dict[str, list[int]] = {}
    for giver in heapq.nsmallest(MAX_GIVERS, loads, key=lambda load: (-load.token_s(), load.worker)):
        queue: list[RunningSample] | None = None
        while giver.load and receivers:
            here_s, (there_s, _, receiver) = giver.token_s(), receivers[0]
            if receiver is giver or here_s < DEAD_BAND * there_s:
                break
            if queue is None:
                queue = sorted(giver.running(), key=lambda s: (s.started, -s.remaining_tokens, s.id), reverse=True)
            if not queue or not _pays(queue[-1], here_s, receiver):
                break
            sample = queue.pop()
            released.setdefault(giver.worker, []).append(sample.id)
            giver.load, giver.tokens = giver.load - 1, giver.tokens - sample.tokens
            receiver.load, receiver.tokens = receiver.load + 1, receiver.tokens + sample.tokens
            if receiver.load < receiver.limit:
                heapq.heapreplace(receivers, (receiver.token_s(1), receiver.worker, receiver))
            else:
                heapq.heappop(receivers)
    return released


def _pays(sample: RunningSample, here_s: float, receiver: WorkerLoad) -> bool:
    cost_s = HAND_OFF_S + receiver.prefill_s(sample.tokens if sample.started else 0)
    if sample.started and sample.on_worker_s < MIN_STAY_PER_COST * cost_s:
        return False
    return sample.remaining_tokens * (here_s - receiver.token_s(1, sample.tokens)) > MIN_GAIN_PER_COST * cost_s


def rebalance(world: World, now: Now) -> list[Effect]:
    """Reclaim samples that would end sooner on another worker (paper, algorithm 2, continuous balancing)."""
    if now.mono - world.periodic.rebalanced_at < REBALANCE_EVERY_S:
        return []
    world.periodic.rebalanced_at = now.mono
    effects = _revoke_overdue_releases(world.fleet, world.queues, now)
    by_serving: dict[tuple[Serving, ...], list[Worker]] = {}
    for worker in world.fleet.workers.values():
        if worker.generates:
            by_serving.setdefault(worker.serving(), []).append(worker)
    for serving, workers in sorted(by_serving.items()):
        # Queued samples count in no load yet: they are placed first, then loads are compared again.
        versions = dict(serving)
        queued = any(each.oldest_version <= versions.get(each.job_id, -1) for each in world.queues)
        if queued or any(worker.releasing for worker in workers):
            continue
        specs = [job.record.spec for job_id, _ in serving if (job := world.jobs.get(job_id))]
        replays = any(spec.trainer.router_replay != "none" for spec in specs)
        options = {name for spec in specs for name in SAMPLING_OPTIONS if getattr(spec.sampling, name, None)}
        options |= {"batch_invariant"} if any(spec.trainer.deterministic for spec in specs) else set()
        able = [
            worker
            for worker in workers
            if (worker.returns_routed_experts or not replays) and options <= worker.sampling_options
        ]
        loads = [_load_of(world.jobs, world.fleet, worker, now) for worker in able]
        for worker_id, sample_ids in select_migrations([load for load in loads if load.profile.known]).items():
            worker = world.fleet.workers[worker_id]
            effects += reclaim(worker, [worker.samples[i] for i in sample_ids], now)
    return effects


def _load_of(jobs: Jobs, fleet: Fleet, worker: Worker, now: Now) -> WorkerLoad:
    return WorkerLoad(
        worker=worker.id,
        batch_cap=max(1, worker.batch_cap),
        limit=worker.admitted,
        load=len(worker.samples),
        tokens=worker.kv.held,
        profile=worker.profile if worker.profile.known else fleet.fallback_profile,
        speed=worker.speed,
        running=lambda: _running(jobs, worker, now),
    )


def _running(jobs: Jobs, worker: Worker, now: Now) -> Iterable[RunningSample]:
    served = {job_id for job_id, _ in worker.serving()}
    for sample in worker.in_order():
        job = jobs.get_active(sample.request.job_id) if sample.request.job_id in served else None
        if job is None:
            continue  # the worker still serves a job that has ended, or will not serve this one any more
        if not sample.finish and not sample.request.sampling.grammar:  # few engines continue one
            yield RunningSample(
                id=sample.id,
                remaining_tokens=job.progress.lengths.remaining_tokens(sample),
                tokens=tokens_of(sample),
                started=sample.n_tokens > 0,
                on_worker_s=now.mono - sample.placed_at,
            )


def reclaim(worker: Worker, samples: Sequence[Sample], now: Now) -> list[Effect]:
    """Ask a worker to release samples; they are assigned to others once it has released them."""
    worker.release([sample.id for sample in samples], now.mono)
    release = Release(
        samples=pack([sample.id for sample in samples], U64), attempts=pack([sample.attempt for sample in samples], U32)
    )
    tokens: dict[str, list[int]] = {}
    for sample in samples:
        tokens.setdefault(sample.request.job_id, []).append(sample.n_tokens)
    requested = [
        event("reclaim_requested", now, job_id, worker=worker.id, samples=len(each), tokens=sum(each))
        for job_id, each in tokens.items()
    ]
    return [Send(worker.id, release), *requested]


def _revoke_overdue_releases(fleet: Fleet, queues: Queues, now: Now) -> list[Effect]:
    """Revoke samples that workers do not release in time."""
    effects: list[Effect] = []
    for worker in fleet.workers.values():
        for sample_id, since in list(worker.releasing.items()):
            if now.mono - since > RELEASE_LIMIT_S:
                sample = worker.samples[sample_id]
                effects += fleet.revoke(sample)
                unassign(fleet, queues, sample)
    return effects
