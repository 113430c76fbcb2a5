"""The manager's state: jobs, fleet, token ledger, queues, and the changes that keep them consistent.

`apply_messages` changes it by messages and `decide` by decisions. Both leave their effects in `outbox`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from rlboost.services.rollout_manager.domain.effects import EmitEvent, ForgetJob, Outbox
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.progress import JobProgress
from rlboost.services.rollout_manager.domain.jobs.record import Job, QuarantinedJob
from rlboost.services.rollout_manager.domain.jobs.table import JobTable
from rlboost.services.rollout_manager.domain.scheduling.candidates import CandidatePools, set_batch_cap
from rlboost.services.rollout_manager.domain.scheduling.queue import SampleQueues
from rlboost.services.rollout_manager.domain.scheduling.requirements import InFlightCounts, requirement_of
from rlboost.services.rollout_manager.domain.token_log.ledger import FrameOutcome, Ledger
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.fleet import Fleet
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.shared.messages import Drain, Event, GroupRequested, Revoke
from rlboost.shared.messages.command_digest import command_digest
from rlboost.shared.wire.columns import U32, U64, pack


class Now(NamedTuple):
    """One moment on both clocks, in seconds: `mono` for durations, `wall` (Unix) for people."""

    mono: float
    wall: float


@dataclass(slots=True)
class PeriodicDecisions:
    """When decisions that are not taken in every turn were taken last (manager's clock), or on what inputs."""

    reallocated_at: float = -1.0e9
    rebalanced_at: float = -1.0e9
    charged_at: float | None = None
    """None: this manager has not charged a job yet."""
    allocated_for: Hashable = None
    """The inputs of the last allocation of workers: `allocate` compares and updates them."""
    activated_for: Hashable = None
    """The inputs of the last activation of reserved workers: `activate_reserved` compares and updates them."""
    decided_once: bool = False
    """False until the first decisions: until then this manager may have started in the middle of a step."""


class World:
    """Jobs, fleet, ledger and queues."""

    def __init__(self, lease_s: float, prices: Mapping[str, float] = MappingProxyType({})) -> None:
        """Start empty; for the arguments see `Fleet`."""
        self.jobs = JobTable()
        self.quarantined: dict[str, QuarantinedJob] = {}
        """Stored jobs that cannot be parsed: see `quarantine`."""
        self.progress: Mapping[str, JobProgress] = self.jobs.progress
        self.audits: Mapping[str, Audit] = self.jobs.audits
        self.fleet = Fleet(lease_s, prices)
        self.candidates = CandidatePools(self.fleet)
        self.ledger = Ledger()
        self.in_flight = InFlightCounts()
        self.queues = SampleQueues()
        self.served: dict[int, Sample] = {}
        """Clients' samples in flight."""
        self.unattended_since: dict[int, float] = {}
        """Group whose client is disconnected -> since when (manager's clock)."""
        self.periodic = PeriodicDecisions()
        self.outbox = Outbox()

    def emit_event(self, kind: str, now: Now, to_job: str | None = None, /, **fields: Any) -> None:
        """Append to the events of one job, or of every active one."""
        event = Event(kind=kind, at=now.wall, source="manager", fields=fields)
        for job in [to_job] if to_job else [job.id for job in self.jobs.active()]:
            self.outbox.add(EmitEvent(job, event))

    # --- jobs ---

    def is_quarantined(self, sample: Sample) -> bool:
        """Return True if the sample's job is quarantined: nothing is decided about it."""
        return sample.request.job_id in self.quarantined

    def may_have_samples(self, job_id: str) -> bool:
        """Return True if the job's samples may be in flight: it has not ended, or it is quarantined.

        A record of the token log about any other job changes nothing: its samples were dropped when it ended, which a
        later record tells.
        """
        return job_id in self.progress or job_id in self.quarantined

    def committed_version(self, job_id: str) -> int:
        """Return the newest committed weight version of a job, -1 before the first."""
        progress = self.progress.get(job_id)
        return progress.committed_version if progress else -1

    def forget_job(self, job: Job) -> None:
        """Drop all of a job that ended long ago."""
        del self.jobs[job.id]
        self.outbox.add(ForgetJob(job.id))

    def audit_of(self, job_no: int) -> Audit | None:
        """Return a job's audit, None when the job is unknown or its audit was dropped."""
        entry = self.jobs.numbered(job_no)
        return entry.audit if entry else None

    def audit_frames(self, outcome: FrameOutcome) -> None:
        """Count the tokens of frames."""
        for job_no, tokens in outcome.accepted.items():
            if audit := self.audit_of(job_no):
                audit.tokens_generated += tokens
        for job_no, cause, tokens in outcome.refused:
            if audit := self.audit_of(job_no):
                audit.tokens_generated += tokens
                audit.tokens_regenerated[cause] += tokens
        for job_no, rows in outcome.duplicates.items():
            if audit := self.audit_of(job_no):
                audit.duplicates += rows

    # --- samples ---

    def is_known(self, request: GroupRequested) -> bool:
        """Return True if the group was admitted before: it is in flight, delivered or dropped."""
        if self.ledger.knows(request):
            return True
        progress = self.progress.get(request.job_id)
        return progress is not None and any(progress.is_delivered(request.group + i) for i in range(request.n))

    def on_admitted(self, samples: Iterable[Sample]) -> None:
        """Count samples that the ledger has just admitted, and queue them."""
        for sample in samples:
            requirement = requirement_of(sample)
            self.in_flight.add(requirement)
            if progress := self.progress.get(requirement.job_id):  # else it is quarantined
                if requirement.is_serving:
                    self.served[sample.id] = sample
                else:
                    progress.requested_step = max(requirement.newest_version, progress.requested_step)
            self.enqueue(sample)

    def enqueue(self, sample: Sample) -> None:
        """Queue a sample without an owner, unless its job is quarantined."""
        if progress := self.progress.get(sample.request.job_id):
            self.queues.add(sample, progress.lengths)

    def is_queued(self, sample_id: int) -> bool:
        """Return True if a sample has no owner and is not complete."""
        sample = self.ledger.samples.get(sample_id)
        return sample is not None and not sample.worker and not sample.finish

    def unassign(self, sample: Sample) -> None:
        """Take a sample from its owner, and queue it unless it is complete."""
        self.remove_from_owner(sample)
        sample.worker = ""
        if not sample.finish:
            self.enqueue(sample)

    def unassign_all(self, worker: Worker, now: Now, cause: str) -> None:
        """Take all samples from a worker."""
        samples = [self.ledger.samples[i] for i in sorted(worker.samples)]
        for sample in samples:
            self.unassign(sample)
        for job_id in sorted({sample.request.job_id for sample in samples}):
            of_job = [sample for sample in samples if sample.request.job_id == job_id]
            n, tokens = len(of_job), sum(sample.n_tokens for sample in of_job)
            self.emit_event("samples_unassigned", now, job_id, worker=worker.id, samples=n, tokens=tokens, cause=cause)

    def revoke(self, sample: Sample) -> None:
        """Command the owner of a sample, if it has one, to stop generating it."""
        if sample.worker in self.fleet.workers:
            samples, attempts = pack([sample.id], U64), pack([sample.attempt], U32)
            self.outbox.send(sample.worker, Revoke(samples=samples, attempts=attempts))

    def remove_from_owner(self, sample: Sample) -> None:
        """Take a sample from its owner's samples, if it has an owner."""
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None and sample.id in owner.samples:  # not while the log is replayed
            owner.remove(sample)

    # --- workers ---

    def command_digest(self, worker: Worker) -> int:
        """Return the digest of what a worker has after all commands so far, less samples whose end is in the log.

        Releases, a suspension and another job's weights take samples from it before they are unassigned here.
        """
        suspended, job_id = worker.assigned_active is False, worker.job
        owned = [] if suspended else [self.ledger.samples[i] for i in worker.samples - worker.releasing.keys()]
        samples = [sample for sample in owned if not sample.finish and sample.request.job_id == job_id]
        attempts = [sample.attempt for sample in samples]
        return command_digest([s.id for s in samples], attempts, worker.assigned_version, suspended=suspended)

    def drain(self, worker: Worker, now: Now, reason: str) -> None:
        """Drain a worker that works as it should."""
        self.command_drain(worker, reason)
        self.emit_event("worker_drained", now, worker=worker.id, job_id=worker.job, reason=reason)

    def command_drain(self, worker: Worker, reason: str) -> None:
        """Command a worker to hand off its samples and exit."""
        self.fleet.on_drain(worker)
        self.outbox.send(worker.id, Drain(reason=reason))

    def update_batch_cap(self, worker: Worker) -> None:
        """Derive a worker's batch cap from what its kind has shown."""
        progress = self.progress.get(worker.job_id)
        set_batch_cap(worker, progress.lengths.mean if progress else 0.0)
