"""The manager's state, by owner, and how samples leave it.

`apply_messages` changes it by messages and `decide` by decisions. Both return their effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rlboost.services.rollout_manager.domain.candidates import supports
from rlboost.services.rollout_manager.domain.effects import (
    FAILED,
    REFUSED,
    Deliver,
    Effect,
    Now,
    Record,
    Refuse,
    save_length,
    store_turn,
)
from rlboost.services.rollout_manager.domain.jobs import JobEntry, Jobs
from rlboost.services.rollout_manager.domain.queue import Queues, requirement_of
from rlboost.services.rollout_manager.domain.siblings import EndedSiblings
from rlboost.services.rollout_manager.domain.tokens import Ledger, Sample
from rlboost.services.rollout_manager.domain.workers import STALL_LIMIT_S, Fleet
from rlboost.shared.ids import is_served, job_of
from rlboost.shared.job.base import UntrainedJob
from rlboost.shared.messages import FINISH_STOP, Closed, GroupRequested, SampleDropped, SampleFinished
from rlboost.shared.wire import U64, pack


@dataclass(slots=True)
class PeriodicDecisions:
    """When decisions that are not taken in every turn were taken last (manager's clock)."""

    reallocated_at: float = -1.0e9
    rebalanced_at: float = -1.0e9
    stalls_checked_at: float = -1.0e9
    charged_at: float | None = None
    """None: this manager has not charged a job yet."""
    unattended_since: dict[int, float] = field(default_factory=dict)
    """Group of a client's samples whose client is disconnected -> since when (manager's clock)."""
    decided_once: bool = False
    """False until the first decisions: until then this manager may have started in the middle of a step."""


class World:
    """The owners: jobs, the fleet, the ledger with all samples in flight, and the queues of those without a worker."""

    def __init__(
        self,
        lease_s: float,
        prices: Mapping[str, float] = MappingProxyType({}),
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """Start empty; for the arguments see `Fleet`."""
        self.jobs = Jobs()
        self.fleet = Fleet(lease_s, prices, stall_limit_s)
        self.ledger = Ledger()
        self.queues = Queues(self.jobs)
        self.siblings = EndedSiblings()
        self.periodic = PeriodicDecisions()

    def is_known(self, request: GroupRequested) -> bool:
        """Return True if the group was admitted before: it is in flight, delivered or dropped."""
        return self.ledger.knows(request) or self.jobs.is_any_delivered(request)


# --- refused versions -------------------------------------------------------------------------------------------------
#
# A version that an engine cannot load is refused by its worker, which stays and can serve other versions and jobs.


def refusal_of(fleet: Fleet, job: JobEntry, version: int) -> str:
    """Return why no worker can serve a version; empty if one can, or has not tried.

    Workers differ: one with another engine may serve what others refuse.
    """
    refusal = job.progress.refusal
    if refusal is None or refusal.version != version:
        return ""
    # One that yields its device does not load.
    loading = (worker for worker in fleet.workers.values() if not worker.yields)
    assigned = {worker.id for worker in loading if worker.assigned_version == (job.id, version)}
    if not assigned <= refusal.reasons.keys():
        return ""
    worker, reason = next(reversed(refusal.reasons.items()))
    return f"version {version} does not load on {worker}: {reason}"


def drop_refused(world: World) -> list[Effect]:
    """Drop the samples of external trainers, and of served models, that only a refused version could generate.

    A trainer of the service fails the job itself, once it has waited too long for its own samples.
    """
    effects: list[Effect] = []
    for requirement in list(world.queues):
        job = world.jobs[requirement.job_id]
        if requirement.is_serving or not isinstance(job.record.spec, UntrainedJob):
            continue
        reason = refusal_of(world.fleet, job, requirement.newest_version)
        if not reason or any(requirement.is_met_by(worker) for worker in world.fleet.workers.values()):
            continue
        queued = [i for i, sample in world.ledger.samples.items() if requirement_of(sample) == requirement]
        for sample_id in queued:
            if world.ledger.is_queued(sample_id):
                effects += drop(world, world.ledger.samples[sample_id], REFUSED, reason)
    return effects


# --- ends of samples --------------------------------------------------------------------------------------------------
#
# Each sample ends exactly once, delivered or dropped with a reason (invariant 1). What the manager decides is recorded
# in the token log; `apply_closed` applies such a record.


def deliver_to_trainer(world: World, sample: Sample) -> list[Effect]:
    """Deliver a complete sample to the trainer."""
    job_id = sample.request.job_id
    if sample.failed_on:
        world.fleet.on_delivered(sample)
    is_longest = world.jobs[job_id].progress.lengths.on_finished(sample)
    if is_longest and world.queues and (queue := world.queues.get(requirement_of(sample))):
        queue.set_estimate(sample.request.group, float(sample.n_tokens))
    world.siblings.add(sample, world.ledger)
    group_done, closed = _close(world, sample)
    audit = world.jobs[job_id].audit
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
    return [*closed, *_to_trainer(sample.request, message)]


def deliver_to_client(world: World, sample: Sample) -> list[Effect]:
    """End a client's sample after the client has received everything it needs."""
    revoked = world.fleet.revoke(sample)
    _, closed = _close(world, sample)
    audit = world.jobs[sample.request.job_id].audit.serving
    audit.delivered += 1
    audit.tokens_delivered += sample.n_tokens
    return [*revoked, *closed]


def drop(world: World, sample: Sample, cause: str, reason: str = "") -> list[Effect]:
    """Report to the requester that a sample is not delivered, and why.

    Args:
        world: changed in place.
        sample: a sample of the trainer or of a client.
        cause: counted in the audit; one of few.
        reason: for the requester; the cause if empty.

    """
    revoked = world.fleet.revoke(sample)
    group_done, closed = _close(world, sample)
    audit = world.jobs[sample.request.job_id].audit
    audit.tokens_regenerated["dropped"] += sample.n_tokens
    if is_served(sample.id):
        audit.serving.dropped[cause] += 1
        is_retryable = cause != FAILED and not world.jobs[sample.request.job_id].record.ended
        return [*revoked, *closed, Refuse(sample.id, reason or cause, is_retryable=is_retryable)]
    audit.dropped[cause] += 1
    message = SampleDropped(sample=sample.id, reason=reason or cause, group_done=group_done)
    return [*revoked, *closed, *_to_trainer(sample.request, message)]


def _to_trainer(request: GroupRequested, end: SampleFinished | SampleDropped) -> list[Effect]:
    """Tell the trainer how a sample ended; the end of a turn is stored with its session, too."""
    delivered = Deliver(request.job_id, end)
    return [delivered, store_turn(request, end)] if request.session else [delivered]


def apply_closed(world: World, sample_ids: Iterable[int]) -> None:
    """Apply a record of samples that this manager or an earlier one has delivered or dropped."""
    for sample_id in sample_ids:
        remove_sample(world, sample_id)
        if is_served(sample_id) and (job := world.jobs.numbered(job_of(sample_id))):
            job.progress.forget_delivered(sample_id)  # no later entry of the log is about it


def remove_sample(world: World, sample_id: int) -> None:
    """Remove a sample that is delivered or dropped from the ledger and from every count that follows it."""
    sample = world.ledger.remove(sample_id)
    if sample is None:
        return
    world.fleet.take(sample)
    world.queues.remove(sample)
    if sample.request.group not in world.ledger.open_in_group:
        world.siblings.forget(sample.request.group)
    if job := world.jobs.get_active(sample.request.job_id):
        job.progress.on_delivered(sample_id)


def _close(world: World, sample: Sample) -> tuple[bool, list[Effect]]:
    """Remove a sample; return True if it was the last open one of its group, and the effects."""
    remove_sample(world, sample.id)
    effects: list[Effect] = [Record(Closed(samples=pack([sample.id], U64)))]
    if sample.request.group in world.ledger.open_in_group:
        return False, effects
    job_id = sample.request.job_id
    lengths = world.jobs[job_id].progress.lengths
    if learned := lengths.on_group_closed(sample):
        effects.append(save_length(job_id, *learned))
    effects += [save_length(job_id, prompt, None) for prompt in lengths.evict()]
    return True, effects


# --- serving ----------------------------------------------------------------------------------------------------------
#
# Ends clients' samples (OpenAI endpoint): they share ledger and placement with the trainer's, but are not delivered.
#
# A finished sample stays in the ledger until its client has it. The ledger is the only buffer: a slow client costs no
# other memory, and a client that lost its connection may reconnect and read what was generated since.


GRACE_S = 30.0
"""How long the samples of a disconnected client that may reconnect continue."""


@dataclass(slots=True)
class Clients:
    """The state of the clients at this moment."""

    attended: set[int] = field(default_factory=set)
    """Groups whose client is connected."""
    satisfied: set[int] = field(default_factory=set)
    """Samples that the client has received completely: to the end, or to a stop string."""
    gone: dict[int, GroupRequested] = field(default_factory=dict)
    """Group whose client disconnected and cannot reconnect -> its request, which may not be admitted yet."""


NO_CLIENTS = Clients()


def end_served_samples(world: World, clients: Clients, now: Now) -> list[Effect]:
    """End the samples that clients have received, and drop those that no client will fetch."""
    effects: list[Effect] = []
    for sample in list(world.ledger.served.values()):
        group = sample.request.group
        if sample.id in clients.satisfied:
            effects += deliver_to_client(world, sample)
        elif group in clients.gone:
            effects += drop(world, sample, "the client disconnected")
        elif now.wall >= sample.request.expires_at:
            effects += drop(world, sample, "out of time")
        elif sample.n_tokens and sample.request.sampling.grammar and _is_stranded(world, sample):
            effects += drop(world, sample, "no worker can continue the structured output")
        elif group not in clients.attended and _grace_is_over(world.periodic, group, now):
            effects += drop(world, sample, "the client did not reconnect")
    unattended, open_groups = world.periodic.unattended_since, world.ledger.open_in_group
    for group in [group for group in unattended if group in clients.attended or group not in open_groups]:
        del unattended[group]
    return effects


def _is_stranded(world: World, sample: Sample) -> bool:
    """Return True if no worker of its job can continue a sample that is queued."""
    job_id, workers = sample.request.job_id, world.fleet.workers.values()
    return world.ledger.is_queued(sample.id) and not any(
        job_id in (worker.job_id, *worker.alongside) and supports(worker, sample) for worker in workers
    )


def _grace_is_over(periodic: PeriodicDecisions, group: int, now: Now) -> bool:
    return now.mono - periodic.unattended_since.setdefault(group, now.mono) > GRACE_S
