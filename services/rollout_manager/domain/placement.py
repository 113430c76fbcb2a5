"""Which worker gets a sample: the one with the fewest pending (paper, algorithm 2, SelectInstance).

Samples wait here, not at a worker, until one can start them nearly at once (late binding): what is not handed out yet
need not be moved when the fleet changes. A worker gets a few more than it has slots, so that a free slot is
filled without a round trip.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from services.rollout_manager.domain.fleet import Worker


def capacity(worker: Worker) -> int:
    """Return how many samples a worker may hold: its slots and one more for every eight."""
    return worker.joined.slots + max(1, worker.joined.slots // 8)


def place(samples: Sequence[int], workers: Iterable[Worker]) -> dict[str, list[int]]:
    """Share out samples in order; those that no worker has room for are left out.

    Args:
        samples: ids in the order in which they should start.
        workers: the candidates.

    Returns:
        Worker id -> samples for it, in order.

    """
    heap = [(*_load(len(w.samples), w.joined.slots), w.id, len(w.samples), w) for w in workers]
    heapq.heapify(heap)
    chosen: dict[str, list[int]] = {}
    for sample in samples:
        while heap and heap[0][3] >= capacity(heap[0][4]):
            heapq.heappop(heap)
        if not heap:
            break
        _, _, worker_id, held, worker = heap[0]
        chosen.setdefault(worker_id, []).append(sample)
        heapq.heapreplace(heap, (*_load(held + 1, worker.joined.slots), worker_id, held + 1, worker))
    return chosen


def _load(held: int, slots: int) -> tuple[int, float]:
    return max(0, held - slots), held / slots
