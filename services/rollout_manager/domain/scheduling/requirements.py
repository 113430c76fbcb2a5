"""What samples require of a worker, and how many samples in flight require it."""

from __future__ import annotations

from typing import NamedTuple

from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.shared.ids import is_served
from rlboost.shared.wire.columns import length

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
        return worker.generates and worker.job_id == self.job_id and self.allows(worker.version)


class InFlightCounts:
    """How many samples are in flight, by requirement, and how many were requested, by step."""

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
            step = requirement.job_id, requirement.newest_version
            self.requested[step] = self.requested.get(step, 0) + 1

    def remove(self, requirement: Requirement) -> bool:
        """Count one sample less; return True if it was the last with this requirement."""
        self.by_requirement[requirement] -= 1
        if self.by_requirement[requirement]:
            return False
        del self.by_requirement[requirement]
        self.revision += 1
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
