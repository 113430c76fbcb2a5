"""The queue of samples without a worker, in the order in which they start.

1. Samples that have tokens already and later turns of a trainer's conversations, the longest remaining first: their
   groups wait for them, and a worker may still have the KV cache of the earlier turns.
2. The others group by group, the oldest first: the trainer gets whole groups early, and those of a group that end give
   drafts to the others. Longest first completes groups later, and steps end no earlier (docs/evaluation.md). Calls of
   agents are in the order of their sessions, and requests of clients, whose ids are random, in that of their arrival.
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


@dataclass(slots=True)
class SampleQueue:
    """The queued samples of one requirement.

    Entries are dropped lazily: `pop_next` skips a sample that is no longer queued or was queued twice.
    """

    samples: list[tuple[bool, float, int, int]] = field(default_factory=list)
    """Heap of (whether it starts, what orders it among these or the others, group or session, sample)."""

    @property
    def empty(self) -> bool:
        """Return True if no sample is queued."""
        return not self.samples

    def add(self, sample: Sample, remaining_tokens: float) -> None:
        """Queue a sample.

        Args:
            sample: it has no owner.
            remaining_tokens: how many more tokens it is expected to generate.

        """
        request, starts = sample.request, not continues(sample)
        # All requests of clients expire after the same time.
        order = request.expires_at if starts else -remaining_tokens
        heapq.heappush(self.samples, (starts, order, request.session or request.group, sample.id))

    def pop_next(self, is_queued: Callable[[int], bool]) -> int | None:
        """Remove and return the next sample for which `is_queued` is true; None if there is none."""
        while self.samples:
            *_, sample = heapq.heappop(self.samples)
            if is_queued(sample):
                return sample
        return None


def continues(sample: Sample) -> bool:
    """Return True if a sample has tokens, or is a later turn of a trainer's conversation."""
    return bool(sample.tokens or (sample.request.preferred_worker and not sample.request.expires_at))


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
        remaining = job.progress.lengths.remaining_tokens(sample) if continues(sample) else 0.0
        self.setdefault(requirement_of(sample), SampleQueue()).add(sample, remaining)

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
