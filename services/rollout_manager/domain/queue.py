"""The queue of samples without a worker, in the order in which they start.

1. Samples that have tokens already, the longest remaining first: their groups wait for them.
2. One *probe* of every group with unknown length: its length becomes the group's first estimate.
3. The others by group, the longest expected first, so that no long sample starts last; an unknown group counts as the
   longest. Every `OLDEST_GROUP_EVERY`th turn goes to the oldest group: no short group starves, and the trainer gets
   whole groups early (longest first alone starves it, then floods it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rlboost.services.rollout_manager.domain.effects import Effect, Now, event
from rlboost.services.rollout_manager.domain.jobs import Jobs
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.shared.ids import is_served
from rlboost.shared.wire import length

# --- requirements -----------------------------------------------------------------------------------------------------
#
# What samples require of a worker, and how many samples in flight require it.


UNLIMITED_VERSION = 1 << 32
"""Newer than every real version."""


class Requirement(NamedTuple):
    """A job, and the weight versions that may generate the sample."""

    job_id: str
    oldest_version: int
    newest_version: int
    """The newest allowed version, which is also the step that trains on the sample, unless it is a client's."""
    is_serving: bool = False
    """True for clients' samples: any version may generate them, so they delay no weight update."""

    def allows(self, version: int) -> bool:
        """Return True if this version may generate the sample."""
        return self.oldest_version <= version <= self.newest_version

    def is_met_by(self, worker: Worker) -> bool:
        """Return True if the worker can generate the sample now."""
        version = worker.serving_version(self.job_id)
        return version is not None and self.allows(version)


class InFlightCounts:
    """How many samples are in flight, by requirement, and how many were requested, by step."""

    def __init__(self) -> None:
        self.by_requirement: dict[Requirement, int] = {}
        self.requested: dict[tuple[str, int], int] = {}
        """(Job id, step) -> samples of a step that is in flight, finished ones included."""

    def add(self, requirement: Requirement) -> None:
        """Count one more sample."""
        self.by_requirement[requirement] = self.by_requirement.get(requirement, 0) + 1
        if not requirement.is_serving:
            step = requirement.job_id, requirement.newest_version
            self.requested[step] = self.requested.get(step, 0) + 1

    def remove(self, requirement: Requirement) -> bool:
        """Count one sample less; return True if it was the last with this requirement."""
        self.by_requirement[requirement] -= 1
        if self.by_requirement[requirement]:
            return False
        del self.by_requirement[requirement]
        step = requirement.job_id, requirement.newest_version
        if not any((other.job_id, other.newest_version) == step for other in self.by_requirement):
            self.requested.pop(step, None)
        return True

    def of_job(self, job_id: str) -> list[Requirement]:
        """Return the requirements of one job's samples."""
        return [requirement for requirement in self.by_requirement if requirement.job_id == job_id]

    def in_step(self, job_id: str, step: int) -> int:
        """Return how many samples of a step are in flight."""
        requirements = [each for each in self.of_job(job_id) if each.newest_version == step]
        return sum(self.by_requirement[requirement] for requirement in requirements)


def requirement_of(sample: Sample) -> Requirement:
    """Return what a sample requires of a worker."""
    request = sample.request
    if is_served(sample.id):
        return Requirement(request.job_id, 0, UNLIMITED_VERSION, is_serving=True)
    return Requirement(request.job_id, request.version - request.max_staleness, request.version)


def max_tokens_of(sample: Sample) -> int:
    """Return the length, prompt included, at which a sample ends at the latest."""
    return length(sample.request.prompt) + sample.request.sampling.max_tokens


# --- queue ------------------------------------------------------------------------------------------------------------


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


class Queues(dict[Requirement, SampleQueue]):
    """The queue of each requirement, one without samples is dropped; and how many samples are in flight."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self.in_flight = InFlightCounts()

    def admit(self, sample: Sample) -> None:
        """Count a sample that the ledger has just admitted, and queue it."""
        self.in_flight.add(requirement_of(sample))
        self.add(sample)

    def add(self, sample: Sample) -> None:
        """Queue a sample without an owner."""
        if (job := self._jobs.get_active(sample.request.job_id)) is None:
            return
        lengths = job.progress.lengths
        remaining = lengths.remaining_tokens(sample) if sample.tokens else 0.0
        self._queue_of(requirement_of(sample)).add(sample, lengths.expected_length(sample), remaining)

    def _queue_of(self, requirement: Requirement) -> SampleQueue:
        return self.setdefault(requirement, SampleQueue())

    def remove(self, sample: Sample) -> None:
        """Count a sample that is delivered or dropped."""
        requirement = requirement_of(sample)
        if self.in_flight.remove(requirement):
            self.pop(requirement, None)

    def in_order(self) -> list[Requirement]:
        """Return the requirements by priority: clients' first, since a person may wait, then the oldest step."""
        return sorted(
            self, key=lambda requirement: (not requirement.is_serving, requirement.newest_version, requirement.job_id)
        )


def unassign(fleet: Fleet, queues: Queues, sample: Sample) -> None:
    """Take a sample from its owner, and queue it unless it is complete."""
    fleet.take(sample)
    sample.worker = ""
    if not sample.finish:
        queues.add(sample)


def unassign_all(
    fleet: Fleet, queues: Queues, worker: Worker, samples: Iterable[Sample], now: Now, cause: str
) -> list[Effect]:
    """Take samples from a worker, and report that to their jobs."""
    taken: dict[str, list[int]] = {}
    for sample in samples:
        unassign(fleet, queues, sample)
        taken.setdefault(sample.request.job_id, []).append(sample.n_tokens)
    return [
        event("samples_unassigned", now, job_id, worker=worker.id, samples=len(n), tokens=sum(n), cause=cause)
        for job_id, n in sorted(taken.items())
    ]
