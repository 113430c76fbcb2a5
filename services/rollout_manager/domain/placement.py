"""Which worker gets the next sample (paper, algorithm 2, SelectInstance; bound late).

Samples wait at the manager until a worker can start them nearly at once: what is not handed out yet need not be moved
when the fleet changes, and workers of any speed get work in proportion, because each asks by becoming free. Of the
workers with room, the one where a token of one more sample takes the least time is best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.profile import Profile
from shared.kv_rows import rows_in

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


def has_room(worker: Worker, limit: int = 0) -> bool:
    """Tell whether the worker should get one more sample, which ends at this length at the latest."""
    n = worker.at_once(limit)
    # Where its KV cache is a rectangle with few rows, few more will be needed soon.
    spare = worker.spare if n == worker.batch else min(worker.spare, max(1, n // 4))
    paged = worker.kv_tokens if not worker.kv_row_tokens else 0
    return worker.load < n + spare and not (paged and worker.kv_held - worker.kv_common > KV_FILL * paged)


def starts(worker: Worker, limit: int) -> bool:
    """Tell whether a sample that ends at this length at the latest would run there without waiting for others' end."""
    return has_room(worker, limit) and worker.load < worker.at_once(limit)


def holds(worker: Worker, limit: int) -> bool:
    """Tell whether its KV cache holds a sample that ends at this length at the latest; else its engine refuses that."""
    return not worker.kv_row_tokens or rows_in(worker.kv_tokens, min(limit, worker.kv_row_tokens)) > 0


def holders(limit: int, pools: Iterable[Candidates], workers: Mapping[str, Worker]) -> list[Worker]:
    """Return all, with room or not, who can have such a sample; where nobody can, all: an engine is to say why."""
    members = [workers[i] for pool in pools for i in pool.members]
    return [worker for worker in members if holds(worker, limit)] or members


def roomier(worker: Worker, limit: int, pools: Iterable[Candidates], workers: Mapping[str, Worker]) -> Worker | None:
    """Return who takes a sample, which was to go to `worker`: another one where only there it need not wait.

    Candidates stand with the longest sample that they have; one that is longer may find no room in the KV cache.
    None where others can have it and `worker` cannot: it waits for them.
    """
    can = holds(worker, limit)
    if can and (not worker.kv_row_tokens or limit <= worker.longest or starts(worker, limit)):
        return worker
    able = holders(limit, pools, workers)
    if can or not holds(able[0], limit):
        return freest(other for other in able if starts(other, limit)) or worker
    return freest(other for other in able if has_room(other, limit))


def freest(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker with the least to do for its slots, None of none."""
    return min(workers, key=lambda worker: (worker.load / worker.joined.slots, worker.id), default=None)


def token_s(worker: Worker, running: int, borrowed: Profile) -> float:
    """Return the time between two tokens of one of `running` samples, by `borrowed` where its own kind is unknown."""
    profile = worker.profile if worker.profile.known else borrowed
    return profile.step_s(min(running, max(1, worker.at_once())), worker.kv_held) / worker.speed


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
        over = max(0, running - worker.at_once())
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
