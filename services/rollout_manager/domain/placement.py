"""Which worker gets the next sample (paper, algorithm 2, SelectInstance; bound late).

Samples wait at the manager until a worker can start them nearly at once: what is not handed out yet need not be moved
when the fleet changes, and workers of any speed get work in proportion, because each asks by becoming free. Of the
workers with room, the one where a token of one more sample takes the least time is best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.profile import Profile

PLATEAU = 0.9
"""A batch reaches the plateau where it makes this share of what all slots would."""
TURNAROUND_S = 0.15
"""From a sample's end to the first token of the next one in its slot: a flush, a turn of the manager, a command."""
KV_FILL = 0.85
"""Part of a KV cache that placement fills: samples grow after they are placed."""


def size(worker: Worker, mean_length: float) -> None:
    """Derive from a worker's profile how many samples it should have.

    Args:
        worker: changed in place.
        mean_length: recent mean of finished samples in tokens; 0 when none is known.

    """
    slots = worker.joined.slots
    tokens_each = worker.kv_held / len(worker.samples) if worker.samples else mean_length / 2
    worker.batch = worker.profile.plateau(slots, PLATEAU, tokens_each)
    if worker.profile.known and mean_length:
        ends_per_s = worker.profile.tokens_per_s(worker.batch, worker.batch * tokens_each) * worker.speed / mean_length
        worker.spare = min(max(1, math.ceil(ends_per_s * TURNAROUND_S)), max(1, slots // 4))
    else:
        worker.spare = max(1, slots // 8)


def has_room(worker: Worker) -> bool:
    """Tell whether the worker should get one more sample."""
    limit = worker.joined.kv_tokens
    return worker.load < worker.batch + worker.spare and not (limit and worker.kv_held > KV_FILL * limit)


def token_s(worker: Worker, running: int, borrowed: Profile) -> float:
    """Return the time between two tokens of one of `running` samples, by `borrowed` where its own kind is unknown."""
    profile = worker.profile if worker.profile.known else borrowed
    return profile.step_s(min(running, worker.batch), worker.kv_held) / worker.speed


@dataclass(slots=True)
class Candidates:
    """The workers with room that serve the same, the best first. Entries that a later one replaced are passed over."""

    heap: list[tuple[int, float, float, str, int]] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    """Worker with room -> number of its entry that counts."""
    members: set[str] = field(default_factory=set)
    """All workers that serve this, those without room too."""
    entries: int = 0

    def offer(self, worker: Worker, borrowed: Profile) -> None:
        """Let a worker stand here as it is now: to be chosen only if it has room."""
        self.members.add(worker.id)
        if not has_room(worker):
            self.newest.pop(worker.id, None)
            return
        self.entries += 1
        self.newest[worker.id] = self.entries
        running = worker.load + 1
        over = max(0, running - worker.batch)
        rank = (over, token_s(worker, running, borrowed), running / worker.joined.slots, worker.id, self.entries)
        heapq.heappush(self.heap, rank)
        if len(self.heap) > 4 * len(self.newest) + 64:
            self.heap = [entry for entry in self.heap if self.newest.get(entry[3]) == entry[4]]
            heapq.heapify(self.heap)

    def leave(self, worker_id: str) -> None:
        """Take a worker out."""
        self.members.discard(worker_id)
        self.newest.pop(worker_id, None)

    def best(self) -> str | None:
        """Return the best worker, None when none has room."""
        heap = self.heap
        while heap and self.newest.get(heap[0][3]) != heap[0][4]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


def best_of(pools: Iterable[Candidates]) -> str | None:
    """Return the best worker of several pools."""
    found = [(pool.heap[0], worker) for pool in pools if (worker := pool.best()) is not None]
    return min(found)[1] if found else None
