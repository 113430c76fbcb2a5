"""Ends samples: each exactly once, delivered or dropped with a reason (invariant 1).

What the manager decides is recorded in the token log by `Outbox.record_closed`; `apply_closed` applies such a record.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.services.rollout_manager.domain.effects import FAILED, Refuse, SaveLength
from rlboost.services.rollout_manager.domain.scheduling.requirements import requirement_of
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.ids import is_served, job_of
from rlboost.shared.messages import FINISH_STOP, SampleDropped, SampleFinished


def deliver_to_trainer(world: World, sample: Sample) -> None:
    """Deliver a complete sample to the trainer."""
    job_id = sample.request.job_id
    if sample.failed_on:
        world.fleet.on_delivered(sample)
    is_longest = world.progress[job_id].lengths.on_finished(sample)
    if is_longest and world.queues and (queue := world.queues.get(requirement_of(sample))):
        queue.set_estimate(sample.request.group, float(sample.n_tokens))
    group_done = _close(world, sample)
    audit = world.audits[job_id]
    audit.delivered += 1
    audit.tokens_delivered += sample.n_tokens
    message = SampleFinished(
        sample=sample.id,
        tokens=bytes(sample.tokens),
        logprobs=bytes(sample.logprobs),
        finish="stop" if sample.finish == FINISH_STOP else "length",
        spans=sample.spans,
        attempts=sample.attempt,
        group_done=group_done,
        routed_experts=sample.routed_experts,
    )
    world.outbox.deliver(job_id, message)


def deliver_to_client(world: World, sample: Sample) -> None:
    """End a client's sample after the client has received everything it needs."""
    world.revoke(sample)
    _close(world, sample)
    audit = world.audits[sample.request.job_id].serving
    audit.delivered += 1
    audit.tokens_delivered += sample.n_tokens


def drop(world: World, sample: Sample, cause: str, reason: str = "") -> None:
    """Report to the requester that a sample is not delivered, and why.

    Args:
        world: changed in place.
        sample: a sample of the trainer or of a client.
        cause: counted in the audit; one of few.
        reason: for the requester; the cause if empty.

    """
    world.revoke(sample)
    group_done = _close(world, sample)
    audit = world.audits[sample.request.job_id]
    audit.tokens_regenerated["dropped"] += sample.n_tokens
    if is_served(sample.id):
        audit.serving.dropped[cause] += 1
        is_retryable = cause != FAILED and not world.jobs[sample.request.job_id].ended
        world.outbox.add(Refuse(sample.id, reason or cause, is_retryable=is_retryable))
        return
    audit.dropped[cause] += 1
    message = SampleDropped(sample=sample.id, reason=reason or cause, group_done=group_done)
    world.outbox.deliver(sample.request.job_id, message)


def apply_closed(world: World, sample_ids: Iterable[int]) -> None:
    """Apply a record of samples that this manager or an earlier one has delivered or dropped."""
    for sample_id in sample_ids:
        remove_sample(world, sample_id)
        if is_served(sample_id):
            # No later entry of the log is about it.
            entry = world.jobs.numbered(job_of(sample_id))
            if entry and entry.progress:
                entry.progress.forget_delivered(sample_id)


def remove_sample(world: World, sample_id: int) -> None:
    """Remove a sample that is delivered or dropped from the ledger and from every count that follows it."""
    sample = world.ledger.remove(sample_id)
    if sample is None:
        return
    world.remove_from_owner(sample)
    requirement = requirement_of(sample)
    if world.in_flight.remove(requirement):
        world.queues.pop(requirement, None)
    if requirement.is_serving:
        world.served.pop(sample_id, None)
    if progress := world.progress.get(requirement.job_id):  # else it is quarantined
        progress.on_delivered(sample_id)


def _close(world: World, sample: Sample) -> bool:
    """Remove a sample and record that; return True if it was the last open one of its group."""
    remove_sample(world, sample.id)
    world.outbox.record_closed(sample.id)
    if sample.request.group in world.ledger.open_in_group:
        return False
    job_id = sample.request.job_id
    lengths = world.progress[job_id].lengths
    if learned := lengths.on_group_closed(sample):
        world.outbox.add(SaveLength(job_id, *learned))
    for prompt in lengths.evict():
        world.outbox.add(SaveLength(job_id, prompt, None))
    return True
