"""Ranks the workers for the next sample, for a retry, and for a migration."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.measurements import Profile
from rlboost.services.rollout_manager.domain.queue import Requirement, max_tokens_of
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Serving, Worker
from rlboost.shared.ids import worker_name
from rlboost.shared.messages import RESUMES_GRAMMAR

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
RECHECK_FRACTION = 0.9
"""A fleet is compared in full from this fraction of the dead band: intervals of earlier heartbeats may err so much."""
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


def is_balanced(slowest_s: float, fastest_s: float) -> bool:
    """Return True if no migration can pay.

    Args:
        slowest_s: the longest interval between tokens that a worker has.
        fastest_s: the shortest interval that a worker would have with one more sample.

    """
    return slowest_s < RECHECK_FRACTION * DEAD_BAND * fastest_s


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


# --- candidates -------------------------------------------------------------------------------------------------------
#
# Selects the worker for the next sample, once one can start it (late binding; paper, algorithm 2, SelectInstance).
#
# Samples queue at the manager until a worker can start them almost at once: a queued sample need not migrate when the
# fleet changes, and each worker gets work at the rate at which it frees slots. Among the workers with capacity, the
# best is the one where one more sample gets its tokens fastest.


PLATEAU = 0.9
"""A batch is on the plateau when it reaches this share of the throughput of all slots."""
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
    worker.set_batch(cap, headroom)


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
    """Return True if the worker's engine does what a client asks for; another one would ignore it."""
    sampling = sample.request.sampling
    if sampling.grammar and sample.n_tokens and RESUMES_GRAMMAR not in worker.sampling_options:
        return False
    return sampling.options <= worker.sampling_options


def least_loaded(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker with the smallest load per slot, None if there are no workers."""
    return min(workers, key=lambda worker: (worker.load / worker.joined.slots, worker.id), default=None)


class _Entry(NamedTuple):
    """A worker's rank if it got one more sample; the smallest entry is the best."""

    over: int
    """How many samples it would have beyond its batch cap."""
    step_s: float
    """Duration of its decode step."""
    load: float
    """Its samples per slot."""
    worker: str
    number: int
    """Later entries of a pool have larger numbers."""


@dataclass(slots=True)
class CandidatePool:
    """The workers that serve the same version, those with capacity in a heap. Superseded heap entries are skipped."""

    heap: list[_Entry] = field(default_factory=list)
    valid: dict[str, int] = field(default_factory=dict)
    """Worker with capacity -> number of its valid entry, which is its newest one."""
    members: dict[str, Worker] = field(default_factory=dict)
    """All workers that serve this, with capacity or not."""
    entries: int = 0
    """How many entries there were so far."""
    _intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Member -> seconds between two tokens of one of its samples, as it is loaded and with one more sample."""
    _changed: dict[str, Profile] = field(default_factory=dict)
    """Members whose intervals are computed at the next comparison, each with its profile."""

    def update(self, worker: Worker, fallback: Profile) -> None:
        """Add a worker, or rank it again; `fallback` profiles an unknown kind."""
        profile = worker.profile if worker.profile.known else fallback
        self.members[worker.id] = worker
        self._changed[worker.id] = profile
        if not has_capacity(worker):
            self.valid.pop(worker.id, None)
            return
        self.entries += 1
        self.valid[worker.id] = self.entries
        more, batch_cap = worker.load + 1, worker.batch_cap
        over = more - batch_cap if more > batch_cap else 0
        step_s = profile.step_s(max(1, more - over), worker.kv.held) / worker.speed
        entry = _Entry(over, step_s, more / worker.joined.slots, worker.id, self.entries)
        heap = self.heap
        if heap and heap[0].worker == worker.id:  # superseded: the common case, as the best worker gets the samples
            heapq.heapreplace(heap, entry)
            return
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self.valid) + 64:
            self.heap = [entry for entry in heap if self._is_valid(entry)]
            heapq.heapify(self.heap)

    def remove(self, worker_id: str) -> None:
        """Remove a worker."""
        for by_worker in (self.members, self.valid, self._intervals, self._changed):
            by_worker.pop(worker_id, None)

    def best(self) -> str | None:
        """Return the best worker, None if none has capacity."""
        heap = self.heap
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
        return heap[0].worker if heap else None

    def _is_valid(self, entry: _Entry) -> bool:
        return self.valid.get(entry.worker) == entry.number

    def is_balanced(self) -> bool:
        """Return True if no migration between the members pays, as of their last updates."""
        for worker_id, profile in self._changed.items():
            self._intervals[worker_id] = _intervals_of(self.members[worker_id], profile)
        self._changed.clear()
        now_s, next_s = zip(*self._intervals.values(), strict=True)
        return is_balanced(max(now_s), min(next_s))


def _intervals_of(worker: Worker, profile: Profile) -> tuple[float, float]:
    load, batch_cap, held = worker.load, max(1, worker.batch_cap), worker.kv.held
    now_s = profile.token_interval_s(load, batch_cap, held) / worker.speed
    return now_s, profile.token_interval_s(load + 1, batch_cap, held) / worker.speed


def best_of(pools: Sequence[CandidatePool]) -> str | None:
    """Return the best worker of several pools, None if none has capacity."""
    if len(pools) == 1:
        return pools[0].best()
    found = [(pool.heap[0], worker) for pool in pools if (worker := pool.best()) is not None]
    return min(found)[1] if found else None


class CandidatePools:
    """The pools of a fleet, by what their workers serve. Changed workers are ranked again at the next read."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pools: dict[Serving, CandidatePool] = {}
        self._serving_of: dict[str, Serving] = {}

    def matching(self, requirement: Requirement) -> list[CandidatePool]:
        """Return the pools whose workers may generate samples with this requirement."""
        self.refresh()
        return [
            pool
            for (job_id, version), pool in self._pools.items()
            if job_id == requirement.job_id and requirement.allows(version)
        ]

    def by_serving(self) -> dict[Serving, CandidatePool]:
        """Return the pools by what their workers serve."""
        self.refresh()
        return self._pools

    def _update(self, worker_id: str) -> None:
        """Put a worker into the pool that it belongs to now, with its current rank."""
        worker = self._fleet.workers.get(worker_id)
        serving = (worker.job_id, worker.version) if worker is not None and worker.generates else None
        before = self._serving_of.get(worker_id)
        if before is not None and before != serving:
            del self._serving_of[worker_id]
            self._pools[before].remove(worker_id)
            if not self._pools[before].members:
                del self._pools[before]
        if worker is None or serving is None:
            return
        if before != serving:
            self._serving_of[worker_id] = serving
            if serving not in self._pools:
                self._pools[serving] = CandidatePool()
        self._pools[serving].update(worker, self._fleet.fallback_profile)

    def refresh(self) -> None:
        """Rank the workers again that have changed since the last call."""
        for worker_id in self._fleet.take_changed():
            self._update(worker_id)


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
