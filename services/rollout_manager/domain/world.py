"""Everything the manager knows, and the small changes that keep its parts consistent with each other.

`intake` changes it by messages, `decide` by decisions; both leave what they want done in `actions`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from services.rollout_manager.domain.actions import Action, Deliver, ForgetJob, Record, Refuse, SaveLength, Send, Tell
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.fleet import Fleet, Worker
from services.rollout_manager.domain.jobs import AsideJob, Job
from services.rollout_manager.domain.ledger import Ledger, Sample
from services.rollout_manager.domain.lengths import Lengths
from services.rollout_manager.domain.needs import Need, common_of, kv_of, limit_of, need_of, revoke
from services.rollout_manager.domain.placement import Candidates, size
from services.rollout_manager.domain.seeding import Window
from services.rollout_manager.domain.waiting import Waiting
from shared.columns import U64, pack
from shared.ids import SampleId, is_served, job_of
from shared.messages import (
    FINISH_STOP,
    Closed,
    Event,
    GroupRequested,
    Message,
    SampleDropped,
    SampleFinished,
)

Serving = tuple[str, int]
"""What a worker serves: (job id, weight version)."""


class Crew(NamedTuple):
    """How many workers a job can count on: there, not on their way out, and not another job's."""

    reserved: int = 0
    reserved_awake: int = 0
    """Not suspended."""
    preemptible: int = 0
    preemptible_ready: int = 0
    """Can generate for a step in flight now."""


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
        self.aside: dict[str, AsideJob] = {}
        """Those that cannot be read: see `aside`."""
        self.fleet = Fleet(lease_s)
        self.ledger = Ledger()
        self.windows: dict[str, Window] = {}
        self.crews: dict[str, Crew] = defaultdict(Crew)
        self.restless = True
        """Whether anything has changed that may matter to who serves what."""
        self.resumed = True
        """Whether this manager may have come in the middle of a step: until it has decided once."""
        self.audits: dict[str, Audit] = defaultdict(Audit)
        self.lengths: dict[str, Lengths] = defaultdict(Lengths)
        self.committed: dict[str, int] = {}
        """Job id -> newest committed weight version."""
        self.delivered: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Job id -> step -> samples delivered or dropped, for steps that may be asked for again."""
        self.requested_step: dict[str, int] = {}
        """Job id -> newest step that groups were asked for."""
        self.live: dict[Need, int] = {}
        """How many samples in flight need what."""
        self.asked: dict[tuple[str, int], int] = {}
        """(Job id, step) -> samples of a step that is in flight, the finished ones too."""
        self.served: dict[int, Sample] = {}
        """Those of clients."""
        self.unattended_since: dict[int, float] = {}
        """Group of a client that is not there -> since when (manager's clock)."""
        self.stalled_since: dict[str, float] = {}
        """Job id -> since when (Unix) samples of it wait and no worker could take one."""
        self.below_share_since: dict[str, float] = {}
        """Job id -> since when (manager's clock) it has fewer workers than its share, and samples that wait."""
        self.directed_at = self.balanced_at = -1.0e9
        """When (manager's clock) workers were last given to jobs, and when loads were last evened out."""
        self.actions: list[Action] = []
        self.waiting: dict[Need, Waiting] = {}
        self._active: dict[str, Job] = {}
        self._closed: list[int] = []
        self._pools: dict[Serving, Candidates] = {}
        self._pool_of: dict[str, Serving] = {}
        self._changed: dict[str, None] = {}

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
        if self._closed:
            self.record(Closed(samples=pack(self._closed, U64)))
            self._closed = []
        actions, self.actions = self.actions, []
        return actions

    # --- jobs ---

    def add_job(self, job: Job) -> None:
        """Know a job."""
        self.jobs[job.id] = job
        self.job_by_no[job.no] = job
        if not job.ended:
            self._active[job.id] = job
            self._active = dict(sorted(self._active.items(), key=lambda item: item[1].no))

    def is_aside(self, sample: Sample) -> bool:
        """Tell whether nothing is to be done about a sample, because its job cannot be read."""
        return sample.request.job_id in self.aside

    def active_jobs(self) -> list[Job]:
        """Return the jobs that have not ended, oldest first."""
        return list(self._active.values())

    def end_job(self, job: Job) -> None:
        """Forget what only a job that runs needs."""
        self._active.pop(job.id, None)
        self.restless = True
        for by_job in (self.windows, self.crews, self.lengths, self.delivered, self.committed, self.requested_step):
            by_job.pop(job.id, None)
        self.stalled_since.pop(job.id, None)
        self.below_share_since.pop(job.id, None)

    def forget_job(self, job: Job) -> None:
        """Drop a job that ended long ago."""
        del self.jobs[job.id], self.job_by_no[job.no]
        self.actions.append(ForgetJob(job.id))

    def audit_of(self, job_no: int) -> Audit | None:
        """Return a job's audit, None when the job is unknown or long over."""
        job = self.job_by_no.get(job_no)
        if job is None:
            return None
        return self.audits.get(job.id) if job.ended else self.audits[job.id]

    # --- samples ---

    def is_known(self, request: GroupRequested) -> bool:
        """Tell whether the group was admitted before, whatever became of it."""
        done = self.delivered[request.job_id].get(SampleId.unpack(request.group).step, ())
        return self.ledger.knows(request) or any(request.group + i in done for i in range(request.n))

    def admitted(self, samples: Iterable[Sample]) -> None:
        """Count samples that the ledger has just taken in, and let them wait."""
        for sample in samples:
            need = need_of(sample)
            if need not in self.live:
                self.restless = True
            self.live[need] = self.live.get(need, 0) + 1
            if not need.serves:
                step = need.job_id, need.version
                self.asked[step] = self.asked.get(step, 0) + 1
                self.requested_step[need.job_id] = max(need.version, self.requested_step.get(need.job_id, -1))
            elif not self.is_aside(sample):
                self.served[sample.id] = sample
            self.wait(sample)

    def wait(self, sample: Sample) -> None:
        """Let a sample without an owner wait for one."""
        if self.is_aside(sample):
            return
        need = need_of(sample)
        waiting = self.waiting.get(need)
        if waiting is None:
            waiting = self.waiting[need] = Waiting()
        lengths = self.lengths[need.job_id]
        waiting.add(sample, lengths.estimate(sample), lengths.rest(sample) if sample.tokens else 0.0)

    def waits(self, sample_id: int) -> bool:
        """Tell whether a sample has no owner and is not complete."""
        sample = self.ledger.samples.get(sample_id)
        return sample is not None and not sample.worker and not sample.finish

    def orphan(self, sample: Sample) -> None:
        """Take a sample from its owner and let it wait."""
        self._take_from_owner(sample)
        sample.worker = ""
        if not sample.finish:
            self.wait(sample)

    def orphan_all(self, worker: Worker, now: Now, cause: str) -> None:
        """Take all samples from a worker."""
        samples = [self.ledger.samples[i] for i in sorted(worker.samples)]
        for sample in samples:
            self.orphan(sample)
        if samples:
            tokens = sum(sample.n_tokens for sample in samples)
            self.tell("samples_taken", now, worker=worker.id, samples=len(samples), tokens=tokens, cause=cause)

    def _take_from_owner(self, sample: Sample) -> None:
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None:
            owner.samples.discard(sample.id)
            owner.releasing.pop(sample.id, None)
            self.changed(owner)

    def close(self, sample_ids: Iterable[int]) -> None:
        """End samples in the ledger and in every count that follows it."""
        for sample in self.ledger.close(sample_ids):
            self._take_from_owner(sample)
            need = need_of(sample)
            self.live[need] -= 1
            if not self.live[need]:
                del self.live[need]
                self.restless = True
                self.waiting.pop(need, None)
                if not any((live.job_id, live.version) == need[:2] for live in self.live):
                    self.asked.pop(need[:2], None)
            self.served.pop(sample.id, None)
            self.note_delivered(sample.request.job_id, sample.id)

    def forget_served(self, sample_ids: Iterable[int]) -> None:
        """Forget clients' samples whose end was read in the log: nothing of them is behind it."""
        for sample_id in filter(is_served, sample_ids):
            job = self.job_by_no.get(job_of(sample_id))
            steps, step = self.delivered.get(job.id if job else "", {}), SampleId.unpack(sample_id).step
            if step in steps:
                steps[step].discard(sample_id)
                if not steps[step]:
                    del steps[step]

    def note_delivered(self, job_id: str, sample_id: int) -> None:
        """Remember that who asked for this sample has it, or knows that it will not come."""
        self.delivered[job_id][SampleId.unpack(sample_id).step].add(sample_id)

    def deliver(self, sample: Sample) -> None:
        """Hand a complete sample to the trainer and close it (invariant 1)."""
        job_id = sample.request.job_id
        if self.lengths[job_id].finished(sample) and (waiting := self.waiting.get(need_of(sample))):
            waiting.estimated(sample.request.group, float(sample.n_tokens))
        group_done = self._close_one(sample)
        audit = self.audits[job_id]
        audit.delivered += 1
        audit.tokens_delivered += sample.n_tokens
        message = SampleFinished(
            sample=sample.id,
            tokens=bytes(sample.tokens),
            logprobs=bytes(sample.logprobs),
            finish="stop" if sample.finish == FINISH_STOP else "length",
            spans=list(sample.spans),
            attempts=sample.attempt,
            group_done=group_done,
        )
        self.deliver_message(job_id, message)

    def hand_over(self, sample: Sample) -> None:
        """Close a client's sample of which the client has all that it wants."""
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None:
            self.send(owner, revoke(sample))
        self._close_one(sample)
        audit = self.audits[sample.request.job_id].serving
        audit.delivered += 1
        audit.tokens_delivered += sample.n_tokens

    def drop(self, sample: Sample, reason: str) -> None:
        """Tell who asked for a sample that it will not come, and why, and close it (invariant 1)."""
        owner = self.fleet.workers.get(sample.worker)
        if owner is not None:
            self.send(owner, revoke(sample))
        group_done = self._close_one(sample)
        audit = self.audits[sample.request.job_id]
        audit.tokens_made_again["dropped"] += sample.n_tokens
        if is_served(sample.id):
            audit.serving.dropped[reason.partition(":")[0]] += 1  # what follows is of one request
            self.actions.append(Refuse(sample.id, reason))
            return
        audit.dropped[reason] += 1
        message = SampleDropped(sample=sample.id, reason=reason, group_done=group_done)
        self.deliver_message(sample.request.job_id, message)

    def _close_one(self, sample: Sample) -> bool:
        """Close a sample and tell whether its group is over by that."""
        self.close([sample.id])
        self._closed.append(sample.id)
        group_done = sample.request.group not in self.ledger.open_in_group
        if group_done:
            job_id = sample.request.job_id
            if learnt := self.lengths[job_id].group_closed(sample):
                self.actions.append(SaveLength(job_id, *learnt))
            for prompt in self.lengths[job_id].forget():
                self.actions.append(SaveLength(job_id, prompt, None))
        return group_done

    # --- who could take a sample ---

    def changed(self, worker: Worker) -> None:
        """Note that a worker may have more or less room than before, or serve something else."""
        self._changed[worker.id] = None

    def pools(self, need: Need) -> list[Candidates]:
        """Return the workers that could take a sample now, by what they serve."""
        self._refresh()
        return [
            pool
            for (job_id, version), pool in self._pools.items()
            if job_id == need.job_id and need.oldest <= version <= need.version
        ]

    def _refresh(self) -> None:
        changed, self._changed = self._changed, {}
        for worker_id in changed:
            self.offer(worker_id)

    def offer(self, worker_id: str) -> None:
        """Let a worker stand among the candidates as it is now."""
        worker = self.fleet.workers.get(worker_id)
        serving = (worker.job_id, worker.version) if worker is not None and worker.generates else None
        before = self._pool_of.get(worker_id)
        if before is not None and before != serving:
            del self._pool_of[worker_id]
            self._pools[before].leave(worker_id)
            if not self._pools[before].members:
                del self._pools[before]
        if worker is not None and serving is not None:
            self._pool_of[worker_id] = serving
            self._pools.setdefault(serving, Candidates()).offer(worker, self.fleet.borrowed)

    def serving(self) -> dict[Serving, list[Worker]]:
        """Return the workers that generate, by what they serve."""
        self._refresh()
        workers = self.fleet.workers
        return {serving: [workers[i] for i in sorted(pool.members)] for serving, pool in self._pools.items()}

    def resize(self, worker: Worker) -> None:
        """Derive anew how many samples a worker should have, from what its kind has shown."""
        samples = [self.ledger.samples[i] for i in worker.samples]
        worker.kv_held = sum(map(kv_of, samples))
        if page := worker.kv_page_tokens:
            others = {sample.request.group: sample for sample in samples}
            worker.kv_common = sum(common_of(s, page) for s in samples if others[s.request.group] is not s)
        if worker.kv_row_tokens:
            worker.longest = max(map(limit_of, samples), default=0)
        size(worker, self.lengths[worker.job_id].mean if worker.job_id in self.lengths else 0.0)
        self.changed(worker)
