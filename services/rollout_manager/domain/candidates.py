"""Ranks the workers for the next sample, for a retry, and for a migration."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.measurements import Profile
from rlboost.services.rollout_manager.domain.queue import max_tokens_of
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Worker
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
