"""The queue of samples without a worker, in the order in which they start.

1. Samples that have tokens already, the longest remaining first: their groups wait for them.
2. One *probe* of every group with unknown length: its length becomes the group's first estimate.
3. The others by group, the longest expected first, so that no long sample starts last; an unknown group counts as the
   longest. Every `OLDEST_GROUP_EVERY`th turn goes to the oldest group: no short group starves, and the trainer gets
   whole groups early (longest first alone starves it, then floods it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from rlboost.services.rollout_manager.domain.scheduling.length_estimates import LengthEstimates
from rlboost.services.rollout_manager.domain.scheduling.requirements import Requirement, requirement_of
from rlboost.services.rollout_manager.domain.token_log.sample import Sample

OLDEST_GROUP_EVERY = 4


@dataclass(slots=True)
class SampleQueue:
    """The queued samples of one requirement.

    Entries are dropped lazily: `pop_next` skips a sample that is no longer queued or was queued twice.
    """

    resumed: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (-remaining tokens, sample) of samples that have tokens."""
    probes: list[int] = field(default_factory=list)
    """Heap of groups whose first sample starts as a probe."""
    longest: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (-estimate, group)."""
    oldest: list[int] = field(default_factory=list)
    """Heap of groups."""
    unstarted: dict[int, list[int]] = field(default_factory=dict)
    """Group -> heap of its samples without tokens."""
    estimates: dict[int, float] = field(default_factory=dict)
    """Group of `unstarted` -> its estimate; entries of `longest` with another one are superseded."""
    turns: int = 0
    """How many groups were selected that needed no probe."""

    @property
    def empty(self) -> bool:
        """Return True if no sample is queued."""
        return not self.resumed and not self.unstarted

    def add(self, sample: Sample, estimate: float | None, remaining_tokens: float) -> None:
        """Queue a sample.

        Args:
            sample: it has no owner.
            estimate: expected length of its group's samples in tokens; None when unknown.
            remaining_tokens: how many more tokens it is expected to generate.

        """
        if sample.tokens:
            heapq.heappush(self.resumed, (-remaining_tokens, sample.id))
            return
        group = sample.request.group
        samples = self.unstarted.get(group)
        if samples is None:
            samples = self.unstarted[group] = []
            heapq.heappush(self.oldest, group)
            self.set_estimate(group, float(sample.request.sampling.max_tokens) if estimate is None else estimate)
            if estimate is None and sample.id == group:
                heapq.heappush(self.probes, group)
        heapq.heappush(samples, sample.id)

    def set_estimate(self, group: int, length: float) -> None:
        """Set the expected length of a group's samples, in tokens."""
        if group in self.unstarted:
            self.estimates[group] = length
            heapq.heappush(self.longest, (-length, group))

    def pop_next(self, is_queued: Callable[[int], bool]) -> int | None:
        """Remove and return the next sample for which `is_queued` is true; None if there is none."""
        while (sample := self._next()) is not None:
            if is_queued(sample):
                return sample
        return None

    def _next(self) -> int | None:
        if self.resumed:
            return heapq.heappop(self.resumed)[1]
        if not self.unstarted:
            self.probes.clear()
            self.longest.clear()
            self.oldest.clear()
            return None
        return self._pop_unstarted(self.next_group())

    def next_group(self) -> int:
        """Return the group of `unstarted` whose next sample starts; the simulator replaces this by other orders."""
        while self.probes:
            group = heapq.heappop(self.probes)
            if group in self.unstarted:
                return group
        self.turns += 1
        if self.turns % OLDEST_GROUP_EVERY == 0:
            while self.oldest[0] not in self.unstarted:
                heapq.heappop(self.oldest)
            return self.oldest[0]
        while (top := self.longest[0])[1] not in self.unstarted or -top[0] != self.estimates[top[1]]:
            heapq.heappop(self.longest)
        return top[1]

    def _pop_unstarted(self, group: int) -> int:
        samples = self.unstarted[group]
        sample = heapq.heappop(samples)
        if not samples:
            del self.unstarted[group], self.estimates[group]
        return sample


class SampleQueues(dict[Requirement, SampleQueue]):
    """The queue of each requirement; one without samples is dropped."""

    def add(self, sample: Sample, lengths: LengthEstimates) -> None:
        """Queue a sample, with the estimates of its job."""
        estimate = lengths.expected_length(sample)
        remaining = lengths.remaining_tokens(sample) if sample.tokens else 0.0
        self.setdefault(requirement_of(sample), SampleQueue()).add(sample, estimate, remaining)

    def in_order(self) -> list[Requirement]:
        """Return the requirements by priority: clients' first, since a person may wait, then the oldest step."""
        return sorted(
            self, key=lambda requirement: (not requirement.is_serving, requirement.newest_version, requirement.job_id)
        )
