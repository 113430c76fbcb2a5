"""Samples that fail wherever they run, told apart from those that were only there.

An engine that refuses a sample names it. One that dies or hangs does not, and may have had hundreds: all of them are
suspected. Who has failed on two workers is on trial: alone among its like on a third, so that another death there is
its own, until it has got past the place where the last one struck. What a sample makes next depends on the sample
alone, so what breaks an engine does it at the same place again.

A worker that is taken away, or is lost without a word, makes nobody suspect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.ledger import Sample, name_of
from services.rollout_manager.domain.placement import freest, has_room


def on_trial(sample: Sample) -> bool:
    """Tell whether one more failure is the sample's last, and it is not past where it failed."""
    return sample.is_over_limit(1) and not sample.past_failure


def suspects(samples: Sequence[Sample]) -> list[Sample]:
    """Return those of a dead engine's samples that may have been its death."""
    running = [sample for sample in samples if not sample.finish]
    return [sample for sample in running if on_trial(sample)] or running


def taker(sample: Sample, members: Sequence[Worker], samples: Mapping[int, Sample]) -> Worker | None:
    """Return who of `members` takes a sample that has failed: somebody else, if possible; None while nobody can."""
    others = [worker for worker in members if name_of(worker.id) not in sample.failed_on]
    if on_trial(sample):
        courts = [worker for worker in others or members if not any(on_trial(samples[i]) for i in worker.samples)]
        return freest(filter(has_room, courts))
    return freest(filter(has_room, others)) or freest(filter(has_room, members))
