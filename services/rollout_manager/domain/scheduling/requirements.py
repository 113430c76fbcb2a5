"""What samples require of a worker, and how many samples in flight require it."""

from __future__ import annotations

from typing import NamedTuple

from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.shared.ids import is_served
from rlboost.shared.wire.columns import length

ANY_VERSION = 1 << 32
"""Newer than every real version."""


class Requirement(NamedTuple):
    """A job, and the range of weight versions that may generate the sample."""

    job_id: str
    version: int
    """The newest version that may generate it, which is the step that trains on it."""
    oldest: int

    @property
    def is_serving(self) -> bool:
        """Return True for clients' samples: any version may generate them, so they delay no weight update."""
        return self.version == ANY_VERSION


class InFlight:
    """Counts the samples in flight by requirement, and those requested by step."""

    def __init__(self) -> None:
        self.by_requirement: dict[Requirement, int] = {}
        self.requested: dict[tuple[str, int], int] = {}
        """(Job id, step) -> samples of a step that is in flight, finished ones included."""
        self.revision = 0
        """Rises when a requirement appears or disappears."""

    def add(self, requirement: Requirement) -> None:
        """Count one more sample."""
        if requirement not in self.by_requirement:
            self.revision += 1
        self.by_requirement[requirement] = self.by_requirement.get(requirement, 0) + 1
        if not requirement.is_serving:
            step = requirement.job_id, requirement.version
            self.requested[step] = self.requested.get(step, 0) + 1

    def remove(self, requirement: Requirement) -> bool:
        """Count one sample less; return True if it was the last with this requirement."""
        self.by_requirement[requirement] -= 1
        if self.by_requirement[requirement]:
            return False
        del self.by_requirement[requirement]
        self.revision += 1
        step = requirement.job_id, requirement.version
        if not any((other.job_id, other.version) == step for other in self.by_requirement):
            self.requested.pop(step, None)
        return True

    def of_job(self, job_id: str) -> list[Requirement]:
        """Return the requirements of one job's samples."""
        return [requirement for requirement in self.by_requirement if requirement.job_id == job_id]

    def in_step(self, job_id: str, step: int) -> int:
        """Return how many samples of a step are in flight."""
        return sum(n for requirement, n in self.by_requirement.items() if requirement[:2] == (job_id, step))


def requirement_of(sample: Sample) -> Requirement:
    """Return what a sample requires of a worker."""
    request = sample.request
    if is_served(sample.id):
        return Requirement(request.job_id, ANY_VERSION, 0)
    return Requirement(request.job_id, request.version, request.version - request.max_staleness)


def max_tokens_of(sample: Sample) -> int:
    """Return the length, prompt included, at which a sample ends at the latest."""
    return length(sample.request.prompt) + sample.request.sampling.max_tokens
