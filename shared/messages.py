"""All messages on the wire, frozen and tagged. `shared.codec` encodes them.

Rules, each held by `tests/unit/test_messages.py` and the golden bytes in `tests/golden`:

- a message is a map `{"t": tag, field: value, ...}`; the tag names the class;
- a field may be added with a default; no field is renamed, retyped or removed;
- a reader ignores unknown fields, so an older service can read a newer message;
- columns with one entry per token or sample are bytes (`shared.columns`), never lists;
- a value that no service sends, such as a negative count or an infinite rate, does not decode.

Times are Unix seconds, durations seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict

from rlboost.shared.message_fields import (
    Attempt,
    Column32,
    Column64,
    Count,
    Finite,
    PackedId,
    Seconds,
    Span,
    Version,
)

Role = Literal["reserved", "preemptible"]
WorkerState = Literal["joining", "pulling", "ready", "suspended", "draining"]
FinishReason = Literal["stop", "length"]
JobState = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]
InFlight = Literal["recompute", "keep", "finish"]
"""What happens to running samples at a weight update: they continue with the new weights, with their KV cache
recomputed (`recompute`) or as it is (`keep`); or they finish with the old weights first (`finish`)."""

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_RELEASED = 0, 1, 2, 3
"""Codes of `TokenFrame.finish`: the sample continues; it ended with a stop token; it ended at `max_tokens`; the worker
released it because the manager reclaimed it (`Release`)."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: ClassVar[str] = ""


_REGISTRY: dict[str, type[Message]] = {}

M = TypeVar("M", bound=type[Message])


def message(cls: M) -> M:
    """Register a message class under its tag (its own name, unless it sets one)."""
    cls.tag = cls.tag or cls.__name__
    if cls.tag in _REGISTRY:
        raise ValueError(f"two messages with the tag {cls.tag!r}")
    _REGISTRY[cls.tag] = cls
    return cls


def registered() -> dict[str, type[Message]]:
    """Return a copy of the tag -> class table, for tests and documentation."""
    return dict(_REGISTRY)


def class_of(tag: str) -> type[Message]:
    """Return the class of a tag.

    Raises:
        KeyError: the tag is unknown.

    """
    return _REGISTRY[tag]


# --- jobs -------------------------------------------------------------------------------------------------------------


@message
class JobCommand(Message):
    """REST or CLI -> manager and trainer: a command on a job. Idempotent on `command_id`."""

    command_id: str
    action: Literal["create", "pause", "resume", "cancel"]
    job_id: str
    job_no: Annotated[int, Field(ge=0, lt=1 << 16)]
    spec_json: str = ""
    """The resolved job file (`shared.job.spec.JobSpec`) as JSON; only with `create`."""


@message
class JobReport(Message):
    """Trainer -> manager: the job's state changed."""

    job_id: str
    state: JobState
    step: Count
    error: str = ""
    trainer: str = ""
    """Name of the trainer that runs the job; reserved workers that name it share their device with it."""


@message
class StepReport(Message):
    """Trainer -> manager: one training step is complete and its weights are committed. Idempotent on (job, step)."""

    job_id: str
    step: Count
    """The completed step, from 0; the next step is `step + 1`."""
    metrics: dict[str, float]
    checkpointed_step: Count = 0
    """Samples of earlier steps will not be requested again."""
    wait_s: Seconds = 0.0
    """How long the trainer waited for samples while the device was its own."""
    train_s: Seconds = 0.0
    """How long the trainer trained."""
    warnings: list[str] = []
    """The warnings about the job's learning that hold after this step, one line each."""


@message
class Event(Message):
    """Any service -> users: an event of a job. Best effort; no decision depends on it."""

    kind: str
    at: Finite
    source: str
    fields: dict[str, Any] = {}


# --- groups to generate -----------------------------------------------------------------------------------------------


class Sampling(Message):
    """Sampling parameters. The returned `logprobs` are of exactly this distribution."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 256
    stop_token_ids: Annotated[tuple[int, ...], Strict(False)] = ()


@message
class GroupRequested(Message):
    """Trainer or REST -> manager: generate `n` completions of one prompt. Idempotent on `group`."""

    job_id: str
    group: PackedId
    """Packed id of the group's sample 0 (`shared.ids.SampleId`); sample i is `group + i`."""
    n: Annotated[int, Field(ge=1, le=256)]
    prompt: Column32
    """int32 column of prompt token ids."""
    sampling: Sampling
    version: Version
    """The weight version that trains on it, which is the newest one that may generate it."""
    seed: int
    max_staleness: Count = 0
    """Versions down to `version - max_staleness` may generate it."""
    expires_at: Seconds = 0.0
    """When a client's request expires; any version may generate it. 0: the trainer's request."""
    preferred_worker: str = ""
    """A worker that may have the prompt's prefix in its cache, and gets the samples if it has capacity."""


# --- the token log ----------------------------------------------------------------------------------------------------
# This one ordered stream defines the state of samples in flight: the manager's ledger is a replay of it.


@message
class Admitted(Message):
    """Manager -> log: a group was taken from `rollouts.requested`."""

    request: GroupRequested


@message
class Placed(Message):
    """Manager -> log: `worker` owns these samples now. Increments their attempts, which fences earlier owners.

    Written in the same transaction as the worker's `Assign`.
    """

    worker: str
    samples: Column64
    """uint64 column."""
    attempts: Column32
    """uint32 column: the attempt that starts with this placement, from 1."""
    offsets: Column32
    """uint32 column: the number of tokens in the ledger, which the assignment contains."""


@message
class TokenFrame(Message):
    """Worker -> log: the tokens since the worker's last flush, of all its samples.

    A row is one sample; `counts[i]` tokens of `tokens` and `logprobs` belong to it. A row counts only if its attempt is
    the sample's current one and its offset meets the ledger's length. All tokens of a row are of one weight version.
    """

    worker: str
    seq: int
    """Counts this worker's frames from 0; a frame sent twice has the same number."""
    samples: bytes
    """uint64 column."""
    attempts: bytes
    """uint32 column."""
    offsets: bytes
    """uint32 column: index of the row's first token within the completion."""
    counts: bytes
    """uint32 column."""
    versions: bytes
    """uint32 column: the weight version that generated the row's tokens."""
    finish: bytes
    """uint8 column of FINISH_* codes."""
    tokens: bytes
    """int32 column."""
    logprobs: bytes
    """float32 column: log-probability of each token under the distribution it was sampled from."""


@message
class SampleFailed(Message):
    """Worker -> log: this sample itself cannot be generated (say, the prompt is too long). Fenced like a frame row.

    Manager -> log: the engine of `worker` died or hung while it ran this sample, which may have been the cause.
    """

    worker: str
    sample: PackedId
    attempt: Attempt
    reason: str


@message
class Closed(Message):
    """Manager -> log: these samples were delivered or dropped; later records of them do not count.

    Written in the same transaction as the delivery.
    """

    samples: Column64
    """uint64 column."""


@message
class Restated(Message):
    """Manager -> log: a snapshot of one live sample, so that its older records can be trimmed (log compaction)."""

    request: GroupRequested
    """The group's request with `n` as in the original."""
    sample: PackedId
    attempt: Attempt
    worker: str
    """Its current owner; empty while it is queued."""
    tokens: Column32
    logprobs: Column32
    spans: list[Span]
    """(worker, weight version, number of tokens), in order."""
    failures: Count = 0
    failed_on: list[str] = []
    """Names of the workers on which it failed."""


# --- manager -> worker ------------------------------------------------------------------------------------------------


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
class UseVersion(Message):
    """Manager -> worker: pull this version of this job's weights, verify, load, serve. Ordered before its `Assign`s."""

    job_id: str
    version: Version
    in_flight: InFlight = "recompute"


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


# --- worker -> manager ------------------------------------------------------------------------------------------------


@message
class WorkerJoined(Message):
    """Worker -> manager: a new incarnation exists and reads `worker.{id}.commands` from its start."""

    worker: str
    role: Role
    kind: str
    """The kind of machine and engine; throughput profiles are per kind."""
    slots: Annotated[int, Field(ge=1, lt=1 << 31)]
    """The most samples that the engine runs at once."""
    host: str
    pid: int
    price_per_hour: Finite
    at: Finite
    trainer: str = ""
    """Reserved: name of the trainer whose device it shares; empty where there is one trainer only."""
    kv_tokens: Count = 0
    """The KV cache's capacity in tokens, prompts included; 0 if not known yet: see `WorkerHeartbeat`."""


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
    at: Finite
    resident_bytes: Count = 0
    """Resident memory of the process; 0 if unknown."""
    device_used_bytes: Count = 0
    """Memory in use on the engine's device, by all processes; 0 if the engine has no device."""
    device_total_bytes: Count = 0
    kv_tokens: Count = 0
    """How many tokens, prompts included, its engine's KV cache holds at once; 0 where it does not say."""
    kv_block_tokens: Count = 0
    """Size of the KV-cache blocks that samples with a common prefix share; 0 where the engine shares none."""
    max_request_tokens: Count = 0
    """Longest sample, prompt and `max_tokens` together, that the engine accepts; 0 where it accepts any."""


@message
class PreemptionNotice(Message):
    """Worker -> manager: the machine is preempted in `lead_s` seconds; the worker drains."""

    worker: str
    lead_s: Finite
    reason: str
    at: Finite


@message
class WorkerLeft(Message):
    """Worker -> manager: the worker has flushed and exits; its samples can be reassigned at once."""

    worker: str
    reason: str
    at: Finite
    running_at_failure: Column64 = b""
    """uint64 column: samples that the engine ran when it died or hung; empty otherwise."""


# --- manager -> trainer -----------------------------------------------------------------------------------------------


@message
class SampleFinished(Message):
    """Manager -> trainer: one complete sample. Exactly once on `sample`."""

    sample: PackedId
    tokens: Column32
    """int32 column: the completion, with its stop token when there is one."""
    logprobs: Column32
    """float32 column."""
    finish: FinishReason
    spans: list[Span]
    """(worker, weight version, number of tokens), in order; the numbers add up to the length."""
    attempts: Attempt
    group_done: bool
    """True on the last sample of its group to be delivered."""


@message
class SampleDropped(Message):
    """Manager -> trainer: this sample was dropped. Exactly once on `sample`, instead of `SampleFinished`."""

    sample: PackedId
    reason: str
    group_done: bool


@message
class GroupOpened(Message):
    """Trainer -> its successor: how an environment opened a group's conversations. The first record counts."""

    group: PackedId
    prompt_digest: bytes
    """Digest of the samples' prompts; a successor with other prompts cannot use the generated samples."""
    reason: str = ""
    """Why the group is dropped; empty otherwise."""
    detail: str = ""


@message
class TurnAnswered(Message):
    """Trainer -> its successor: an environment's reply to one turn. The first record of a sample counts.

    Written in one transaction with the request of the next turn, if there is one.
    """

    sample: PackedId
    """Of the turn."""
    tokens: Column32 = b""
    """int32 column: what follows the turn in the next prompt; empty after the last turn."""
    reward: float = 0.0
    over: Literal["", "done", "cut"] = ""
    """Set if the conversation has ended: by the environment (`done`), or by a limit (`cut`)."""
    reason: str = ""
    """Why the group is dropped; empty otherwise."""
    detail: str = ""


@message
class SeedingEnded(Message):
    """Manager -> trainer: the reserved engines are suspended; the trainer may use the device for this step."""

    step: Count
    window_s: Seconds
    reason: Literal["window", "finished", "no_reserved"]


@message
class SeedingReopened(Message):
    """Manager -> trainer: no other worker is left; the reserved engines resume, so start no new micro-batch."""

    step: Count


# --- weights ----------------------------------------------------------------------------------------------------------


@message
class WeightsCommitted(Message):
    """Weight store -> all: this version is complete and verified."""

    job_id: str
    version: Version
    manifest_digest: str
    n_bytes: Count
    at: Finite


# --- dead letters -----------------------------------------------------------------------------------------------------


@message
class DeadLetter(Message):
    """Any service -> users: a message that did not decode, or failed too often, with the reason."""

    stream: str
    entry_id: str
    consumer: str
    reason: str
    body: bytes
    at: float
