"""Isolates poison samples: samples that fail on every worker, as opposed to those that only ran when an engine died.

An engine that refuses a sample names it. An engine that dies or hangs may have been running hundreds: all of them are
suspects. A sample that has failed on two workers goes *on trial*: it runs on a third worker, as the only sample on
trial there, so that a further death can be blamed on it, until it is past the position of its last failure. The tokens
of a sample depend on the sample alone, so what breaks an engine breaks the next one at the same position.

A preemption or a lost lease makes no sample a suspect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlboost.services.rollout_manager.domain.scheduling.candidates import has_capacity, least_loaded
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.shared.ids import worker_name


def on_trial(sample: Sample) -> bool:
    """Return True if one more failure drops the sample, and it is not past the position of the last one."""
    return sample.is_over_limit(1) and not sample.past_failure


def suspected_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that may have killed the engine they ran on: those on trial, or all if none is."""
    running = [sample for sample in samples if not sample.finish]
    return [sample for sample in running if on_trial(sample)] or running


def worker_for_retry(sample: Sample, members: Sequence[Worker], samples: Mapping[int, Sample]) -> Worker | None:
    """Return which of `members` retries a failed sample, one where it has not failed if possible; None to wait."""
    others = [worker for worker in members if worker_name(worker.id) not in sample.failed_on]
    if on_trial(sample):
        without_trial = [
            worker for worker in others or members if not any(on_trial(samples[i]) for i in worker.samples)
        ]
        return least_loaded(filter(has_capacity, without_trial))
    return least_loaded(filter(has_capacity, others)) or least_loaded(filter(has_capacity, members))
