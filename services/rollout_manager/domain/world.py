"""The manager's state, by owner, and how samples leave it.

`apply_messages` changes it by messages and `decide` by decisions. Both return their effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rlboost.services.rollout_manager.domain.effects import (
    FAILED,
    REFUSED,
    Deliver,
    Effect,
    Now,
    Record,
    Refuse,
    Send,
    save_length,
    store_turn,
)
from rlboost.services.rollout_manager.domain.jobs import JobEntry, Jobs
from rlboost.services.rollout_manager.domain.queue import Queues, requirement_of
from rlboost.services.rollout_manager.domain.tokens import Ledger, Sample
from rlboost.services.rollout_manager.domain.workers import STALL_LIMIT_S, Fleet, Worker
from rlboost.shared.ids import is_served, job_of
from rlboost.shared.job.base import UntrainedJob
from rlboost.shared.messages import FINISH_STOP, Closed, GroupRequested, SampleDropped, SampleFinished, Siblings
from rlboost.shared.wire import I32, U32, U64, length, pack


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
    world.jobs[job_id].progress.lengths.on_finished(sample)
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
        elif group not in clients.attended and _grace_is_over(world.periodic, group, now):
            effects += drop(world, sample, "the client did not reconnect")
    unattended, open_groups = world.periodic.unattended_since, world.ledger.open_in_group
    for group in [group for group in unattended if group in clients.attended or group not in open_groups]:
        del unattended[group]
    return effects


def _grace_is_over(periodic: PeriodicDecisions, group: int, now: Now) -> bool:
    return now.mono - periodic.unattended_since.setdefault(group, now.mono) > GRACE_S


# --- Completions of samples that have ended, as drafts for their siblings on other workers ----------------------------
# A worker knows what it has generated itself. In the long tail of a step most of a group has ended, and the last
# samples run in small batches, where drafts save most. What is sent is best effort: no decision and no sample depends
# on it.


SIBLINGS_EVERY_S = 0.2
"""How often completions are sent."""
MAX_SIBLING_BYTES = 256 << 10
"""About how much one turn sends to all workers together; the rest follows in the next ones."""
MAX_COMPLETIONS = 8
"""Completions of a group that are kept: more of them make hardly better drafts."""


@dataclass(slots=True)
class _Completion:
    tokens: bytes
    workers: set[str]
    """Those that have it."""


class EndedSiblings:
    """The newest completions of groups that have open samples."""

    def __init__(self) -> None:
        self._is_used = False
        """True once a worker has used drafts: before that, nothing is kept."""
        self._of: dict[int, list[_Completion]] = {}
        self._sent_at = -1.0e9

    @property
    def n_groups(self) -> int:
        """Return the number of groups whose completions are kept."""
        return len(self._of)

    def add(self, sample: Sample, ledger: Ledger) -> None:
        """Keep the completion of a sample that has ended and is still in the ledger, if it has open siblings."""
        group = sample.request.group
        if not self._is_used or ledger.open_in_group.get(group, 0) < 2:
            return
        kept = self._of.setdefault(group, [])
        kept.append(_Completion(bytes(sample.tokens), {sample.attempt_worker}))
        del kept[:-MAX_COMPLETIONS]

    def forget(self, group: int) -> None:
        """Drop the completions of a group whose samples have all ended."""
        self._of.pop(group, None)

    def send(self, fleet: Fleet, now: Now) -> list[Effect]:
        """Send workers that use drafts the completions that they lack."""
        if now.mono - self._sent_at < SIBLINGS_EVERY_S:
            return []
        self._sent_at = now.mono
        effects: list[Effect] = []
        n_bytes = 0
        for worker in fleet.workers.values():
            if not worker.uses_drafts:
                continue
            self._is_used = True
            sent: list[tuple[int, bytes]] = []
            for sample, completion in self._lacking(worker):
                if n_bytes > MAX_SIBLING_BYTES:
                    break
                completion.workers.add(worker.id)
                sent.append((sample.id, completion.tokens))
                n_bytes += len(completion.tokens)
            if sent:
                effects.append(Send(worker.id, _siblings(sent)))
        return effects

    def _lacking(self, worker: Worker) -> Iterator[tuple[Sample, _Completion]]:
        for sample in worker.samples.values():
            for completion in self._of.get(sample.request.group, ()):
                if worker.id not in completion.workers:
                    yield sample, completion


def _siblings(completions: list[tuple[int, bytes]]) -> Siblings:
    return Siblings(
        samples=pack([sample for sample, _ in completions], U64),
        lengths=pack([length(tokens, I32) for _, tokens in completions], U32),
        tokens=b"".join(tokens for _, tokens in completions),
    )
