"""Between the manager and its workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from rlboost.shared.messages.codec import (
    UNNUMBERED_WORKER,
    Attempt,
    Column32,
    Column64,
    Count,
    EntryId,
    EventKind,
    Finite,
    HourlyPrice,
    JobId,
    Message,
    PackedId,
    Role,
    Seconds,
    UnixTime,
    Version,
    message,
)
from rlboost.shared.messages.requests import Sampling

WorkerState = Literal["joining", "pulling", "ready", "suspended", "draining"]
InFlightPolicy = Literal["recompute", "keep", "finish"]
"""What happens to running samples at a weight update: they continue with the new weights, with their KV cache
recomputed (`recompute`) or as it is (`keep`); or they finish with the old weights first (`finish`)."""


class Assignment(Message):
    """One sample to generate, from its prompt or from where an earlier worker stopped."""

    sample: PackedId
    attempt: Attempt
    prompt: Column32
    """int32 column."""
    tokens: Column32
    """int32 column: the completion tokens so far; their number is the offset of the worker's first new token."""
    sampling: Sampling
    seed: int


@message
class Assign(Message):
    """Manager -> worker: generate these, with this weight version."""

    job_id: str
    version: Version
    samples: list[Assignment]


@message
class Revoke(Message):
    """Manager -> worker: stop and discard these samples; later frames of them do not count."""

    samples: Column64
    """uint64 column."""
    attempts: Column32
    """uint32 column."""


@message
class Release(Message):
    """Manager -> worker: stop these samples, flush their tokens, and end each with FINISH_RELEASED.

    They continue on another worker without regenerated tokens. Samples that are not held in this attempt are ignored.
    """

    samples: Column64
    """uint64 column."""
    attempts: Column32
    """uint32 column."""


@message
class Siblings(Message):
    """Manager -> worker: completions that other workers have generated for the prompts of its samples, as drafts.

    Sent only to workers whose heartbeats say `uses_drafts`. Those for samples that it no longer has are ignored.
    """

    samples: Column64
    """uint64 column: for each completion a sample of the worker that has its prompt."""
    lengths: Column32
    """uint32 column: the number of tokens of each completion."""
    tokens: Column32
    """int32 column: the tokens of all completions, one after the other."""


class Alongside(Message):
    """A version of another job that a worker serves with the same model's weights, by its adapter."""

    job_id: JobId
    version: Version
    in_flight: InFlightPolicy = "recompute"


@message
class UseVersion(Message):
    """Manager -> worker: pull this version of this job's weights, verify, load, serve. Ordered before its `Assign`s."""

    job_id: JobId
    version: Version
    in_flight: InFlightPolicy = "recompute"
    alongside: Annotated[tuple[Alongside, ...], Strict(False)] = ()
    """All others to serve at the same time; only for workers whose heartbeats say `max_adapters`."""


@message
class StoreCredential(Message):
    """Manager -> worker: download weights with this credential from now on; the earlier one expires."""

    credential: Annotated[str, Field(repr=False)]


@message
class Suspend(Message):
    """Manager -> reserved worker: the trainer needs the device. Stop all samples, flush, report `suspended`."""

    step: Count


@message
class Resume(Message):
    """Manager -> reserved worker: generate again."""

    step: Count


@message
class Drain(Message):
    """Manager -> worker: accept no new samples, flush, hand off the rest, exit with 0."""

    reason: str = ""


@message
class Dismissed(Message):
    """Manager -> worker: it was declared lost and its samples were reassigned; drop them and join again."""

    reason: str


@message
class WorkerJoined(Message):
    """Worker -> manager: a new incarnation exists and reads `worker.{id}.commands` from its start."""

    worker: str
    role: Role
    kind: Annotated[str, Field(max_length=300)]
    """The kind of machine and engine; throughput profiles are per kind."""
    slots: Annotated[int, Field(ge=1, lt=1 << 31)]
    """The most samples that the engine runs at once."""
    host: Annotated[str, Field(max_length=300)]
    pid: int
    price_per_hour: HourlyPrice
    at: UnixTime
    trainer: str = ""
    """Reserved: name of the trainer whose device it shares; empty where there is one trainer only."""
    kv_tokens: Count = 0
    """The KV cache's capacity in tokens, prompts included; 0 if not known yet: see `WorkerHeartbeat`."""
    startup_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Age of the worker's process; 0 when it joins again, since this time is charged once."""
    protocol: Count = UNNUMBERED_WORKER
    """The worker's `shared.messages.codec.PROTOCOL`."""


WaitKind = Literal["", "engine", "redis", "rewards", "samples", "trainer", "worker"]
"""What programs recognize a wait by; empty for waits that only people read."""


def public_wait(
    subject: str, because: str, since: float, limit_s: float | None = None, kind: WaitKind = ""
) -> dict[str, Any]:
    """Return a wait as the REST API shows it."""
    return {"for": subject, "because": because, "since": since, "limit_s": limit_s, "kind": kind}


class Wait(Message):
    """What a process waits for; see `shared.process.waiting`."""

    subject: str
    because: str
    since: UnixTime
    """Unix seconds, the process's clock."""
    limit_s: Seconds
    kind: str = ""
    """A `WaitKind`, or one of a newer release."""

    def public(self) -> dict[str, Any]:
        """Return the wait as the REST API shows it."""
        return public_wait(self.subject, self.because, self.since, self.limit_s) | {"kind": self.kind}


@message
class WorkerHeartbeat(Message):
    """Worker -> manager: liveness and load. Sent every heartbeat interval and at each change of state."""

    worker: str
    state: WorkerState
    job_id: str
    version: Version
    """The version that the engine has loaded; -1 before the first."""
    running: Count
    pending: Count
    tokens_per_s: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
    at: UnixTime
    resident_bytes: Count = 0
    """Resident memory of the process; 0 if unknown."""
    device_used_bytes: Count = 0
    """Memory in use on the engine's device, by all processes; 0 if the engine has no device."""
    device_total_bytes: Count = 0
    kv_tokens: Count = 0
    """How many tokens, prompts included, its engine's KV cache holds at once; 0 where it does not say."""
    update_s: Seconds = 0.0
    """How long its last weight update took, from the command until the engine could generate; 0 before the first."""
    kv_block_tokens: Count = 0
    """Size of the KV-cache blocks that samples with a common prefix share; 0 where the engine shares none."""
    max_request_tokens: Count = 0
    """Longest sample, prompt and `max_tokens` together, that the engine accepts; 0 where it accepts any."""
    command_digest: PackedId = 0
    """What the commands up to `last_command` assigned, less samples that have ended: see `messages.command_digest`."""
    last_command: EntryId = ""
    """Entry id of the last command that was applied; empty from a worker that sends no digest."""
    waiting: Wait | None = None
    """Its oldest wait."""
    batch: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Mean number of samples in a decode step since an earlier heartbeat; 0 if too few steps were measured since.

    The manager ignores it unless it is from 1 to the worker's slots."""
    step_s: Seconds = 0.0
    """Mean duration of these decode steps."""
    update_pause_s: Seconds = 0.0
    """Part of `update_s` in which the engine could not generate: after the download."""
    returns_routed_experts: bool = True
    """Whether the engine accepts samples that ask for routed experts; True of releases that did not say it, and before
    there is an engine."""
    sampling_options: Annotated[tuple[str, ...], Strict(False)] = ()
    """The `SamplingOption`s that the engine supports, and `RESUMES_GRAMMAR`; none of releases that did not say it."""
    tokens_per_pass: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Mean number of tokens that a sample got in a forward pass since the last heartbeat; 0 without drafts."""
    uses_drafts: bool = False
    """True while the engine looks for drafts of its samples' next tokens: `Siblings` are of use to it."""
    max_adapters: Count = 0
    """How many jobs with adapters of the same weights the engine serves at once; 0: it merges the adapter of one."""
    alongside: Annotated[tuple[Annotated[tuple[JobId, Version], Strict(False)], ...], Strict(False)] = ()
    """What it serves in addition to `job_id` and `version`."""
    slots: Count = 0
    """How many samples it takes at present, where that is fewer than it joined with; 0: as many."""


@message
class PreemptionNotice(Message):
    """Worker -> manager: the machine is preempted in `lead_s` seconds; the worker drains."""

    worker: str
    lead_s: Finite
    reason: str
    at: UnixTime


@message
class WorkerLeft(Message):
    """Worker -> manager: the worker has flushed and exits; its samples can be reassigned at once."""

    worker: str
    reason: str
    at: UnixTime
    running_at_failure: Column64 = b""
    """uint64 column: samples that the engine ran when it died or hung; empty otherwise."""


@message
class WorkerEvent(Message):
    """Worker -> manager: an event of a job, for the job's events. Best effort.

    The manager decides by one kind only, `weights_refused`: the worker cannot load the `version` that it is assigned.
    """

    worker: str
    job_id: str
    kind: EventKind
    at: UnixTime
    fields: dict[str, Any] = Field(default_factory=dict)


@message
class WorkerLog(Message):
    """Worker -> manager: new lines of its log, for the log of the job that it serves. Best effort."""

    worker: str
    job_id: str
    times: Annotated[list[UnixTime], Field(max_length=100)]
    """When each line was logged."""
    texts: Annotated[list[Annotated[str, Field(max_length=2_000)]], Field(max_length=100)]
