"""Everything the manager knows, and the small changes that keep its parts consistent with each other.

`intake` changes it by messages, `decide` by decisions; both leave what they want done in `actions`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from services.rollout_manager.domain.actions import Action, Deliver, Record, Send, Tell
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.fleet import Fleet, Worker
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.ledger import Ledger, Sample, closing
from services.rollout_manager.domain.seeding import Window
from shared.columns import U32, U64, pack
from shared.ids import SampleId
from shared.messages import (
    FINISH_STOP,
    Closed,
    Event,
    GroupRequested,
    Message,
    Revoke,
    SampleDropped,
    SampleFinished,
)

Need = tuple[str, int]
"""What a sample needs of a worker: its job and the weight version."""


class Now(NamedTuple):
    """One moment on both clocks, in seconds: `mono` for durations, `wall` (Unix) for people."""

    mono: float
    wall: float


class World:
    """Jobs, fleet and ledger."""

    def __init__(self, lease_s: float) -> None:
        """Start empty."""
        self.jobs: dict[str, Job] = {}
        self.job_by_no: dict[int, Job] = {}
        self.fleet = Fleet(lease_s)
        self.ledger = Ledger()
        self.windows: dict[str, Window] = {}
        self.audits: dict[str, Audit] = defaultdict(Audit)
        self.committed: dict[str, int] = {}
        """Job id -> newest committed weight version."""
        self.delivered: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Job id -> step -> samples delivered or dropped, for steps that may be asked for again."""
        self.live: dict[Need, int] = {}
        """How many samples in flight need what."""
        self.stalled_since: dict[str, float] = {}
        """Job id -> since when (Unix) samples of it wait and no worker could take one."""
        self.actions: list[Action] = []
        self._waiting: dict[Need, list[tuple[bool, int]]] = defaultdict(list)

    # --- outputs ---

    def record(self, message: Message) -> None:
        """Append to the token log."""
        self.actions.append(Record(message))

    def send(self, worker: Worker, message: Message) -> None:
        """Command a worker."""
        self.actions.append(Send(worker.id, message))

    def deliver_message(self, job_id: str, message: Message) -> None:
        """Append to a job's finished samples."""
        self.actions.append(Deliver(job_id, message))

    def tell(self, kind: str, now: Now, job_id: str | None = None, **fields: Any) -> None:
        """Tell people: in the events of one job, or of every active one."""
        event = Event(kind=kind, at=now.wall, source="manager", fields=fields)
        jobs = [job_id] if job_id else [job.id for job in self.active_jobs()]
        self.actions += [Tell(job, event) for job in jobs]

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in order, and start anew."""
        actions, self.actions = self.actions, []
        return actions

    # --- jobs ---

    def add_job(self, job: Job) -> None:
        """Know a job."""
        self.jobs[job.id] = job
        self.job_by_no[job.no] = job

    def active_jobs(self) -> list[Job]:
        """Return the jobs that have not ended, oldest first."""
        return sorted((job for job in self.jobs.values() if not job.ended), key=lambda job: job.no)

    def audit_of(self, job_no: int) -> Audit | None:
        """Return a job's audit, None when the job is unknown."""
        job = self.job_by_no.get(job_no)
        return self.audits[job.id] if job else None

    # --- samples ---

    def is_known(self, request: GroupRequested) -> bool:
        """Tell whether the group was admitted before, whatever became of it."""
        done = self.delivered[request.job_id].get(SampleId.unpack(request.group).step, ())
        return self.ledger.knows(request) or any(request.group + i in done for i in range(request.n))

    def admitted(self, samples: Iterable[Sample]) -> None:
        """Count samples that the ledger has just taken in, and let them wait."""
        for sample in samples:
            need = need_of(sample)
            self.live[need] = self.live.get(need, 0) + 1
            self.wait(sample)

    def wait(self, sample: Sample) -> None:
        """Let a sample without an owner wait for one: those that have tokens first, then in order of their ids."""
        heapq.heappush(self._waiting[need_of(sample)], (not sample.tokens, sample.id))

    def orphan(self, sample: Sample) -> None:
        """Take a sample from its owner and let it wait."""
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None:
            owner.samples.discard(sample.id)
        sample.worker = ""
        if not sample.finish:
            self.wait(sample)

    def orphan_all(self, worker: Worker, now: Now, cause: str) -> None:
        """Take all samples from a worker."""
        samples = [self.ledger.samples[i] for i in sorted(worker.samples)]
        worker.samples.clear()
        for sample in samples:
            self.orphan(sample)
        if samples:
            tokens = sum(sample.n_tokens for sample in samples)
            self.tell("samples_taken", now, worker=worker.id, samples=len(samples), tokens=tokens, cause=cause)

    def waiting(self, need: Need, limit: int) -> list[Sample]:
        """Take up to `limit` samples that wait for this, in order; put back with `wait` what is not placed."""
        heap, seen = self._waiting[need], set[int]()
        taken: list[Sample] = []
        while heap and len(taken) < limit:
            _, sample_id = heapq.heappop(heap)
            sample = self.ledger.samples.get(sample_id)
            waits = sample is not None and not sample.worker and not sample.finish and need_of(sample) == need
            if sample is not None and waits and sample_id not in seen:
                seen.add(sample_id)
                taken.append(sample)
        if not heap:
            del self._waiting[need]
        return taken

    def waiting_needs(self) -> list[Need]:
        """Return what samples wait for."""
        return [need for need, heap in self._waiting.items() if heap]

    def close(self, column: bytes) -> list[Sample]:
        """End samples in the ledger and in every count that follows it."""
        closed = self.ledger.close(column)
        for sample in closed:
            owner = self.fleet.workers.get(sample.worker)
            if owner is not None:
                owner.samples.discard(sample.id)
            need = need_of(sample)
            self.live[need] -= 1
            if not self.live[need]:
                del self.live[need]
            self.note_delivered(sample.request.job_id, sample.id)
        return closed

    def note_delivered(self, job_id: str, sample_id: int) -> None:
        """Remember that the trainer has this sample, or knows that it will not come."""
        self.delivered[job_id][SampleId.unpack(sample_id).step].add(sample_id)

    def deliver(self, sample: Sample) -> None:
        """Hand a complete sample to the trainer and close it (invariant 1)."""
        self._close_one(sample)
        audit = self.audits[sample.request.job_id]
        audit.delivered += 1
        audit.tokens_delivered += sample.n_tokens
        message = SampleFinished(
            sample=sample.id,
            tokens=bytes(sample.tokens),
            logprobs=bytes(sample.logprobs),
            finish="stop" if sample.finish == FINISH_STOP else "length",
            spans=list(sample.spans),
            attempts=sample.attempt,
            group_done=sample.request.group not in self.ledger.open_in_group,
        )
        self.deliver_message(sample.request.job_id, message)

    def drop(self, sample: Sample, reason: str) -> None:
        """Tell the trainer that a sample will not come, and why, and close it (invariant 1)."""
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None:
            self.send(owner, revoke(sample))
        self._close_one(sample)
        audit = self.audits[sample.request.job_id]
        audit.dropped[reason] += 1
        audit.tokens_made_again["dropped"] += sample.n_tokens
        done = sample.request.group not in self.ledger.open_in_group
        message = SampleDropped(sample=sample.id, reason=reason, group_done=done)
        self.deliver_message(sample.request.job_id, message)

    def _close_one(self, sample: Sample) -> None:
        column = closing([sample])
        self.close(column)
        self.record(Closed(samples=column))


def need_of(sample: Sample) -> Need:
    """Return what a sample needs of a worker."""
    return sample.request.job_id, sample.request.version


def revoke(sample: Sample) -> Revoke:
    """Return the command that takes one sample's current attempt from its owner."""
    return Revoke(samples=pack([sample.id], U64), attempts=pack([sample.attempt], U32))
