"""All jobs that the manager knows, each with its record, its progress and its audit."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter

from rlboost.services.rollout_manager.domain.tokens import FrameOutcome, Sample
from rlboost.services.rollout_manager.domain.windows import Window, WindowTuner
from rlboost.shared.ids import MAX_JOBS, MAX_STEPS, is_served, step_of
from rlboost.shared.job.base import ServedJob, UntrainedJob
from rlboost.shared.job.fleet import HOUR_S
from rlboost.shared.job.spec import StoredJob, parse
from rlboost.shared.messages import ENDED, Event, GroupRequested, JobState, TrainerStatus
from rlboost.shared.messages.codec import MAX_SECONDS

# --- cost -------------------------------------------------------------------------------------------------------------
#
# What a job costs: the time of its trainer and of the workers that serve it, and its price.


class WorkerTime(BaseModel):
    """Time of the workers of one role and kind, or of the trainer, and its price."""

    role: str
    kind: str
    """Kind of the workers; empty for the trainer."""
    seconds: float = 0.0
    dollars: float = 0.0


class Cost(BaseModel):
    """Time of the trainer, and of all workers that served one job."""

    charged_until: float = 0.0
    """Unix seconds; 0 before the first charge."""
    workers: dict[str, WorkerTime] = {}
    """'{role} {kind}' -> its time."""
    budget_reached: bool = False
    """True once the job's remaining budget only just pays for draining its workers. It stays so."""
    reserved_only_s: float = 0.0
    """Estimated duration of the `estimated_steps` with the job's trainer and reserved workers alone."""
    reserved_only_dollars: float = 0.0
    """Estimated price of these steps with the job's trainer and reserved workers alone."""
    estimated_steps: int = 0

    def charge(self, role: str, kind: str, price_per_hour: float, seconds: float) -> None:
        """Add the time of one worker, or of the trainer."""
        key = f"{role} {kind}"
        time = self.workers.get(key)
        if time is None:
            time = self.workers[key] = WorkerTime(role=role, kind=kind)
        time.seconds += seconds
        time.dollars += seconds / HOUR_S * price_per_hour

    def add_estimate(self, steps: int, step_s: float, dollars: float) -> None:
        """Estimate the time and cost of the steps since the last estimate without preemptible workers.

        Args:
            steps: completed steps of the job.
            step_s: duration of one of the new steps without preemptible workers.
            dollars: price of one of them.

        """
        new = steps - self.estimated_steps
        self.reserved_only_s += new * step_s
        self.reserved_only_dollars += new * dollars
        self.estimated_steps = steps

    @property
    def dollars(self) -> float:
        """Return the sum over the trainer and all workers."""
        return sum(time.dollars for time in self.workers.values())


# --- audit ------------------------------------------------------------------------------------------------------------
#
# Counts what happened to every sample and token of one job. Counters only grow.


class ServingAudit(BaseModel):
    """Counters of clients' samples. `requested = delivered + dropped + in flight`, at every moment."""

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """Reason -> dropped samples."""
    tokens_delivered: int = 0
    """Tokens of delivered completions, including a few after a stop string that the client does not get."""


class Audit(BaseModel):
    """Counters of one job.

    At every moment, `requested = delivered + dropped + in flight` for the trainer's samples, and `tokens_generated =
    tokens_delivered + serving.tokens_delivered + tokens_regenerated + tokens in flight` for all samples.
    """

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """Reason -> dropped samples."""
    duplicates: int = 0
    """Frame rows that repeated tokens of the ledger (a frame sent twice); cut, never delivered."""
    tokens_generated: int = 0
    """Tokens that reached the log, each counted once."""
    tokens_delivered: int = 0
    tokens_regenerated: Counter[str] = Counter()
    """Tokens that reached the log and were discarded, by cause."""
    tokens_saved: int = 0
    """Tokens of migrated samples that were not regenerated."""
    preemptions: Counter[str] = Counter()
    """`with_notice` and `without_notice`."""
    migrations: int = 0
    """Times a sample resumed on another worker."""
    serving: ServingAudit = Field(default_factory=ServingAudit)
    cost: Cost = Field(default_factory=Cost)


# --- record -----------------------------------------------------------------------------------------------------------
#
# The stored record of a job, and its states.


_ALLOWED: dict[str, frozenset[JobState]] = {
    "pause": frozenset({"pending", "running", "paused"}),
    "resume": frozenset({"pending", "running", "paused"}),
    "cancel": frozenset({"pending", "running", "paused", "cancelled"}),
}
"""The states in which a command is allowed; repeating a command is no error."""


@dataclass(slots=True)
class Job:
    """The stored record of one job. Times are Unix seconds."""

    id: str
    no: int
    spec: StoredJob
    created_at: float
    state: JobState = "pending"
    step: int = 0
    """Completed steps."""
    started_at: float | None = None
    finished_at: float | None = None
    error: str = ""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, and of the evaluation after it."""
    warnings: list[str] = field(default_factory=list)
    """What the trainer warns of after the last step, one line each."""
    checkpointed_step: int = 0
    trainer: str = ""
    """Name of the trainer that runs it."""
    newest_control: str = ""
    """The newest command on it that was read: `pause`, `resume` or `cancel`."""
    window_tuner: WindowTuner = field(default_factory=WindowTuner)

    @property
    def ended(self) -> bool:
        """Return True if the job will never run again."""
        return self.state in ENDED

    def is_concerned_by(self, event: Event) -> bool:
        """Return True if an event of the fleet belongs to the job's history.

        It happened during the job's life, and concerns a worker that served or serves this job, or no job at all.
        """
        concerned = {event.fields.get("job_id"), event.fields.get("before")}
        lived = self.created_at <= event.at <= (self.finished_at or math.inf)
        return lived and (not event.fields.get("job_id") or self.id in concerned)

    def allows(self, action: str) -> bool:
        """Return True if `pause`, `resume` or `cancel` is allowed now."""
        return self.state in _ALLOWED[action]

    def enter(self, state: JobState, at: float, error: str = "") -> bool:
        """Change the state; return True if it changed. The state of an ended job is final."""
        if self.ended or state == self.state:
            return False
        self.state = state
        if state == "running" and self.started_at is None:
            self.started_at = at
        if state in ENDED:
            self.finished_at = at
            self.error = error
        return True

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Take a step's metrics; the evaluation after the last step leaves the training metrics as they are."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self.latest = metrics if step < self.spec.steps else metrics | self.latest | evaluation

    @property
    def is_file_readable(self) -> bool:
        """False if the job file could not be parsed when it was loaded: `readable_part` has made one up."""
        return self.spec.model != _UNREADABLE

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return {
            "id": self.id,
            "name": self.spec.name,
            "kind": self.spec.kind,
            "state": self.state,
            "step": self.step,
            "steps": 0 if isinstance(self.spec, UntrainedJob) else self.spec.steps,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "latest": self.latest,
            "warnings": self.warnings,
            "error": self.error or None,
        }


_UNREADABLE = "(unreadable)"


def readable_part(job_id: str, text: str, now: float) -> Job:
    """Return what can be read of a stored record that cannot be parsed, in place of the whole; its number may be 0."""
    try:
        found = json.loads(text.encode(errors="replace"))
    except (ValueError, RecursionError):
        found = None
    record = found if isinstance(found, dict) else {}
    file = record["spec"] if isinstance(record.get("spec"), dict) else {}
    steps = max(1, int(_number(file.get("steps"), MAX_STEPS)))
    spec = {
        "name": job_id.rpartition("-")[0] or job_id,
        "model": _UNREADABLE,
        "data": {"train": _UNREADABLE},
        "reward": {"function": "unreadable:unreadable"},
        "steps": steps,
    }
    job = Job(job_id, int(_number(record.get("no"), MAX_JOBS)), parse(spec), created_at=now, state="running")
    job.created_at = _number(record.get("created_at"), MAX_SECONDS) or now
    job.started_at = _number(record.get("started_at"), MAX_SECONDS) or None
    job.step = min(steps, int(_number(record.get("step"), MAX_STEPS)))
    if ended := next((state for state in ENDED if state == record.get("state")), None):
        job.state, job.finished_at = ended, _number(record.get("finished_at"), MAX_SECONDS) or now
    return job


def _number(value: Any, limit: float) -> float:
    """Return the value if it is a number from 0 up to, not including, the limit; else 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if math.isfinite(value) and 0 <= value < limit else 0


_ADAPTER = TypeAdapter(Job)


def to_json(job: Job) -> str:
    """Return the record as JSON."""
    return _ADAPTER.dump_json(job).decode()


def from_json(text: str) -> Job:
    """Return the record in a JSON text.

    Raises:
        ValueError, ConfigError: the text is no record of this version.

    """
    return _ADAPTER.validate_json(text)


# --- length estimates -------------------------------------------------------------------------------------------------
#
# Estimates how long samples get, from finished siblings and from earlier epochs of the same prompt.
#
# Sources: Seer (arXiv 2511.14617) for the longest finished sibling as the estimate; a mean over epochs as in RLHFless
# (arXiv 2602.22718).


NEWEST_EPOCH_WEIGHT = 0.5
"""Weight of the newest epoch in a prompt's mean."""
MAX_PROMPTS = 1 << 16
"""Prompts remembered per job; beyond it the least recently seen are dropped."""
NEWEST_SAMPLE_WEIGHT = 0.02
"""Weight of the newest sample in a job's mean."""


KEY_BYTES = 1 << 20
"""Of a longer prompt, only the end tells it from others: the digest of megabytes takes milliseconds."""


def prompt_key(prompt: bytes) -> str:
    """Return the key under which a prompt is remembered."""
    return blake2b(prompt[-KEY_BYTES:], digest_size=8).hexdigest()


@dataclass(slots=True)
class LengthEstimates:
    """Lengths of one job's samples, in tokens."""

    prompts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Prompt -> mean over epochs of its groups' longest samples; the most recently seen last."""
    longest: dict[int, int] = field(default_factory=dict)
    """Open group -> its longest finished sample."""
    mean: float = 0.0
    """Recent mean of all finished samples; 0 before the first."""

    def expected_length(self, sample: Sample) -> float | None:
        """Return the expected final length of the sample; None when nothing is known of its group."""
        known = self.longest.get(sample.request.group)
        return self.mean_of_epochs(sample) if known is None else float(known)

    def mean_of_epochs(self, sample: Sample) -> float | None:
        """Return the mean length over earlier epochs of the sample's prompt; None for a new prompt."""
        return self.prompts.get(prompt_key(sample.request.prompt)) if self.prompts else None

    def remaining_tokens(self, sample: Sample) -> float:
        """Return how many more tokens the sample is expected to generate.

        A sample that has outgrown its estimate is expected to grow by half: lengths are long-tailed.
        """
        cap = sample.request.sampling.max_tokens
        generated = sample.n_tokens
        expected = self.expected_length(sample) or self.mean or cap
        return min(max(expected - generated, generated / 2, 1.0), cap - generated)

    def on_finished(self, sample: Sample) -> None:
        """Learn from a complete sample."""
        generated = sample.n_tokens
        self.mean += (generated - self.mean) * (NEWEST_SAMPLE_WEIGHT if self.mean else 1.0)
        group = sample.request.group
        self.longest[group] = max(generated, self.longest.get(group, 0))

    def on_group_closed(self, sample: Sample) -> tuple[str, float] | None:
        """Learn from a group when its last sample has closed.

        Args:
            sample: that sample.

        Returns:
            The key of the prompt and its new mean; None if nothing was learned.

        """
        longest = self.longest.pop(sample.request.group, None)
        if longest is None or sample.request.preferred_worker:
            return None  # a later turn of a conversation: its prompt does not come again
        key = prompt_key(sample.request.prompt)
        before = self.prompts.pop(key, float(longest))
        self.prompts[key] = before + NEWEST_EPOCH_WEIGHT * (longest - before)
        return key, self.prompts[key]

    def evict(self) -> list[str]:
        """Drop the prompts beyond `MAX_PROMPTS`, and return them."""
        evicted = []
        while len(self.prompts) > MAX_PROMPTS:
            evicted.append(self.prompts.popitem(last=False)[0])
        return evicted


# --- fleet counts -----------------------------------------------------------------------------------------------------
#
# How many workers a job has.


class FleetCounts(NamedTuple):
    """Numbers of workers allocated to a job that neither drain nor yield to a serving engine beside them."""

    reserved: int = 0
    reserved_awake: int = 0
    """Not suspended."""
    preemptible: int = 0
    preemptible_ready: int = 0
    """Can generate for a step in flight now."""


# --- progress ---------------------------------------------------------------------------------------------------------
#
# What the manager tracks of one job while it runs. All of it can be rebuilt from the streams.


class Refusal(NamedTuple):
    """A version that workers could not load."""

    version: int
    reasons: dict[str, str]
    """Worker -> why, in the order of their reports."""


@dataclass(slots=True)
class JobProgress:
    """One job's versions, steps, delivered samples, lengths and workers."""

    committed_version: int = -1
    """Newest committed weight version."""
    base: str = ""
    """Identity of the model that this version is, or is an adapter of; empty if unknown."""
    used_at: float = -math.inf
    """When the job last had samples in flight (manager's clock)."""
    requested_step: int = -1
    """Newest step that groups were requested for."""
    delivered: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Step -> samples delivered or dropped, for steps that may be requested again."""
    lengths: LengthEstimates = field(default_factory=LengthEstimates)
    window: Window | None = None
    """The seeding window of the current step."""
    fleet: FleetCounts = field(default_factory=FleetCounts)
    step_without_spot_s: float | None = None
    """How long the last measured step would have taken the reserved workers alone; None before one was measured."""
    stalled_since_unix_s: float | None = None
    """Since when (Unix seconds) samples are queued and no worker can take one; None while one can."""
    below_share_since_mono_s: float | None = None
    """Since when (manager's clock) the job has queued samples and fewer workers than its fair share; None otherwise."""

    trainer: TrainerStatus | None = None
    """The value of the trainer's lease on the job, None if no trainer holds it."""
    trainer_renewed_at: float | None = None
    """When the lease was renewed last (Unix); without a renewal, when it was first missed; None before both."""
    trainer_checked_at: float = 0.0
    """When the lease was read last (Unix): no trainer is blamed for an outage of Redis."""

    refusal: Refusal | None = None
    """The version that a worker refused last; each worker that is commanded to use it refuses it again."""

    finishes_at: float | None = None
    """When the job will end (Unix), if no mix of workers within the limits finishes it by its deadline."""
    reported_wait_since: float | None = None
    """When the last wait began (Unix) that was reported to last too long."""

    @property
    def trainer_price_per_hour(self) -> float:
        """Return `TrainerStatus.price_per_hour`, 0 if no trainer holds the job."""
        return self.trainer.price_per_hour if self.trainer else 0.0

    def on_trainer_status(self, status: TrainerStatus | None, now: float) -> None:
        """Record the present value of the trainer's lease, which each renewal changes."""
        self.trainer_checked_at = now
        if self.trainer_renewed_at is None or (status is not None and status != self.trainer):
            self.trainer_renewed_at = now
        self.trainer = status

    def on_refused(self, version: int, worker: str, reason: str) -> None:
        """Record that a worker could not load a version."""
        if self.refusal is None or self.refusal.version != version:
            self.refusal = Refusal(version, {})
        self.refusal.reasons[worker] = reason

    def is_delivered(self, sample_id: int) -> bool:
        """Return True if the sample was delivered or dropped."""
        return sample_id in self.delivered.get(step_of(sample_id), ())

    def on_delivered(self, sample_id: int) -> None:
        """Record that the requester of the sample has it, or knows that it was dropped."""
        self.delivered[step_of(sample_id)].add(sample_id)

    def forget_delivered(self, sample_id: int) -> None:
        """Forget one delivered sample."""
        step = step_of(sample_id)
        if step in self.delivered:
            self.delivered[step].discard(sample_id)
            if not self.delivered[step]:
                del self.delivered[step]

    def forget_steps_before(self, step: int) -> None:
        """Forget delivered samples of steps that are not requested again."""
        for old in [old for old in self.delivered if old < step]:
            del self.delivered[old]


# --- table ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class JobEntry:
    """What the manager knows of one job. An ended job has no progress and, after a while, an audit only in Redis."""

    record: Job
    audit: Audit = field(default_factory=Audit)
    progress: JobProgress = field(default_factory=JobProgress)
    is_audited: bool = True
    """False once no late frame can arrive: Redis has the audit."""

    @property
    def id(self) -> str:
        """Return the job's id."""
        return self.record.id

    @property
    def served_for(self) -> str:
        """Return the id of the job whose model this is; empty if it has its own trainer."""
        return self.record.spec.job if isinstance(self.record.spec, ServedJob) else ""

    def on_ended(self) -> None:
        """Drop the progress, once the job's samples are dropped."""
        self.progress = JobProgress()

    def close_audit(self) -> None:
        """Drop the audit: later frames do not count."""
        self.audit, self.is_audited = Audit(), False


class Jobs(dict[str, JobEntry]):
    """Job id -> what is known of the job; ended jobs are included until they are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._by_no: dict[int, JobEntry] = {}
        self._active: list[JobEntry] = []
        self._models: defaultdict[str, dict[str, JobEntry]] = defaultdict(dict)
        """Job -> the jobs that serve its other models, by id."""

    def add(self, record: Job, audit: Audit | None = None) -> JobEntry:
        """Add a job, with the audit that an earlier manager stored."""
        entry = JobEntry(record, audit or Audit(), is_audited=not record.ended)
        self[record.id] = self._by_no[record.no] = entry
        if entry.served_for:
            self._models[entry.served_for][record.id] = entry
        self._active = sorted((each for each in self.values() if not each.record.ended), key=lambda job: job.record.no)
        return entry

    def forget(self, job_id: str) -> None:
        """Drop all of a job that ended long ago."""
        job = self.pop(job_id)
        del self._by_no[job.record.no]
        self._models.pop(job_id, None)
        self._models.get(job.served_for, {}).pop(job_id, None)

    def numbered(self, job_no: int) -> JobEntry | None:
        """Return the job with this number, None if it is unknown."""
        return self._by_no.get(job_no)

    def active(self) -> list[JobEntry]:
        """Return the jobs that have not ended, oldest first."""
        self._active = [job for job in self._active if not job.record.ended]
        return list(self._active)

    def get_active(self, job_id: str) -> JobEntry | None:
        """Return a job that has not ended; None if it has, or is unknown."""
        job = self.get(job_id)
        return None if job is None or job.record.ended else job

    def models_of(self, job_id: str) -> list[JobEntry]:
        """Return the jobs that have not ended and serve the other models of a job."""
        return [job for job in self._models.get(job_id, {}).values() if not job.record.ended]

    def family_of(self, job_id: str) -> set[str]:
        """Return the ids of a job and of those that serve its other models: what its trainer and device are for."""
        return {job_id, *(job.id for job in self.models_of(job_id))}

    def committed_version(self, job_id: str) -> int:
        """Return the newest committed weight version of a job, -1 before the first."""
        job = self.get(job_id)
        return job.progress.committed_version if job else -1

    def on_requested(self, sample: Sample) -> None:
        """Record the step of a sample that was admitted."""
        if (job := self.get_active(sample.request.job_id)) and not is_served(sample.id):
            job.progress.requested_step = max(sample.request.version, job.progress.requested_step)

    def on_committed(self, job_id: str, version: int, base: str = "") -> None:
        """Record a committed weight version, and the identity of the model's weights that it is or belongs to."""
        if (job := self.get_active(job_id)) and version >= job.progress.committed_version:
            job.progress.committed_version, job.progress.base = version, base

    def is_any_delivered(self, request: GroupRequested) -> bool:
        """Return True if a sample of the group was delivered or dropped."""
        job = self.get_active(request.job_id)
        return job is not None and any(job.progress.is_delivered(request.group + i) for i in range(request.n))

    def audit_of(self, job_no: int) -> Audit | None:
        """Return a job's audit, None when the job is unknown or its audit was dropped."""
        job = self.numbered(job_no)
        return job.audit if job and job.is_audited else None

    def count_frames(self, outcome: FrameOutcome) -> None:
        """Count the tokens of frames in the jobs' audits."""
        for job_no, tokens in outcome.accepted.items():
            if audit := self.audit_of(job_no):
                audit.tokens_generated += tokens
        for job_no, cause, tokens in outcome.refused:
            if tokens and (audit := self.audit_of(job_no)):
                audit.tokens_generated += tokens
                audit.tokens_regenerated[cause] += tokens
        for job_no, rows in outcome.duplicates.items():
            if audit := self.audit_of(job_no):
                audit.duplicates += rows
