"""Selects the worker for the next sample, once one can start it (late binding; paper, algorithm 2, SelectInstance).

Samples queue at the manager until a worker can start them almost at once: a queued sample need not migrate when the
fleet changes, and each worker gets work at the rate at which it frees slots. Among the workers with capacity, the best
is the one where one more sample gets its tokens fastest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.scheduling.rebalance import is_balanced
from rlboost.services.rollout_manager.domain.scheduling.requirements import Requirement, max_tokens_of
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.fleet import Fleet
from rlboost.services.rollout_manager.domain.workers.throughput_model import Profile
from rlboost.services.rollout_manager.domain.workers.worker import Serving, Worker

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
    if worker.load >= worker.batch_cap + worker.headroom:
        return False
    kv = worker.kv
    return not kv.capacity or kv.used <= KV_FILL * kv.capacity


def admits(worker: Worker, sample: Sample) -> bool:
    """Return True if the worker's engine accepts a sample: its maximum length, and the outputs that it asks for."""
    if sample.request.sampling.routed_experts and not worker.returns_routed_experts:
        return False
    return not worker.max_request_tokens or max_tokens_of(sample) <= worker.max_request_tokens


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
        """Start empty."""
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
