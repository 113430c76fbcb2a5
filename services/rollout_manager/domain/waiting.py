"""Samples that wait for a worker, and the order in which they start.

1. What was begun elsewhere, the longest rest first: its group waits for it.
2. One *probe* of every group of which nothing is known: its length is the group's first estimate.
3. The rest by group, the longest expected first, so that no long sample starts last; an unknown group counts as the
   longest. Every `TURN_OF_OLDEST`th turn goes to the oldest group: no short group starves, and the trainer gets whole
   groups early (longest first alone starves it, then floods it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from services.rollout_manager.domain.ledger import Sample

TURN_OF_OLDEST = 4


@dataclass(slots=True)
class Waiting:
    """The samples of one need.

    Entries are dropped late: a sample that does not wait any more, or that stands here twice, is passed over.
    """

    begun: list[tuple[float, int]] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)
    longest: list[tuple[float, int]] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    members: dict[int, list[int]] = field(default_factory=dict)
    """Group -> heap of its samples that are not begun."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Group of `members` -> its estimate; entries of `longest` with another one are old."""
    turns: int = 0

    def __len__(self) -> int:
        """Return how many may wait at most."""
        return len(self.begun) + sum(len(members) for members in self.members.values())

    @property
    def empty(self) -> bool:
        """Tell whether nothing waits."""
        return not self.begun and not self.members

    def add(self, sample: Sample, estimate: float | None, rest: float) -> None:
        """Let a sample wait.

        Args:
            sample: it has no owner.
            estimate: how long its group's samples get, in tokens; None when nothing is known.
            rest: how many tokens it is expected to make yet.

        """
        if sample.tokens:
            heapq.heappush(self.begun, (-rest, sample.id))
            return
        group = sample.request.group
        members = self.members.get(group)
        if members is None:
            members = self.members[group] = []
            heapq.heappush(self.oldest, group)
            self.estimated(group, float(sample.request.sampling.max_tokens) if estimate is None else estimate)
            if estimate is None and sample.id == group:
                heapq.heappush(self.probes, group)
        heapq.heappush(members, sample.id)

    def estimated(self, group: int, length: float) -> None:
        """Note a group's estimate."""
        if group in self.members:
            self.lengths[group] = length
            heapq.heappush(self.longest, (-length, group))

    def pop(self, waits: Callable[[int], bool]) -> int | None:
        """Take the next sample for which `waits` is true; None when there is none."""
        while (sample := self._next()) is not None:
            if waits(sample):
                return sample
        return None

    def _next(self) -> int | None:
        if self.begun:
            return heapq.heappop(self.begun)[1]
        while self.probes:
            group = heapq.heappop(self.probes)
            if group in self.members:
                return self._of(group)
        if not self.members:
            self.longest.clear()
            self.oldest.clear()
            return None
        self.turns += 1
        if self.turns % TURN_OF_OLDEST == 0:
            while self.oldest[0] not in self.members:
                heapq.heappop(self.oldest)
            return self._of(self.oldest[0])
        while (top := self.longest[0])[1] not in self.members or -top[0] != self.lengths[top[1]]:
            heapq.heappop(self.longest)
        return self._of(top[1])

    def _of(self, group: int) -> int:
        members = self.members[group]
        sample = heapq.heappop(members)
        if not members:
            del self.members[group], self.lengths[group]
        return sample
