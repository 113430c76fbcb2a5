"""Every message on the wire, in one module: frozen and tagged. `shared.codec` makes bytes of them.

Rules, each held by `tests/unit/test_messages.py` and the golden bytes in `tests/golden`:

- a message is a map `{"t": tag, field: value, ...}`; the tag names the class;
- a field may be added with a default; none is renamed, retyped or removed;
- a reader ignores fields it does not know, so an older service reads a newer one;
- columns with one entry a token or a sample are bytes (`shared.columns`), never lists.

Times are Unix seconds, durations seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Strict

Role = Literal["reserved", "preemptible"]
WorkerState = Literal["joining", "pulling", "ready", "suspended", "draining"]
FinishReason = Literal["stop", "length"]
JobState = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]
InFlight = Literal["recompute", "keep", "finish"]
"""What becomes of samples that run when new weights come: they go on under these, with their KV cache made anew
(`recompute`) or as it is (`keep`); or they end under the old ones first (`finish`)."""

Span = Annotated[tuple[str, int, int], Strict(False)]
"""(worker, weight version, number of tokens): who made a stretch. msgpack brings tuples back as lists."""

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_RELEASED = 0, 1, 2, 3
"""Codes of `TokenFrame.finish`: the row goes on; it ended with a stop token; it ended at `max_tokens`; the sample goes
on elsewhere, because the manager asked for it back (`Release`)."""


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
        KeyError: there is none.

    """
    return _REGISTRY[tag]


# --- jobs -------------------------------------------------------------------------------------------------------------


@message
class JobCommand(Message):
    """REST or CLI -> manager and trainer: something to do with a job. Idempotent on `command_id`."""

    command_id: str
    action: Literal["create", "pause", "resume", "cancel"]
    job_id: str
    job_no: int
    spec_json: str = ""
    """The resolved job file (`shared.jobspec.JobSpec`) as JSON; only with `create`."""


@message
class JobReport(Message):
    """Trainer -> manager: the job's state changed."""

    job_id: str
    state: JobState
    step: int
    error: str = ""
    trainer: str = ""
    """Name of the trainer that runs the job; reserved workers that name it share their device with it."""


@message
class StepReport(Message):
    """Trainer -> manager: one training step is complete and its weights are committed. Idempotent on (job, step)."""

    job_id: str
    step: int
    """The step that was done, from 0; the job stands at `step + 1` now."""
    metrics: dict[str, float]
    checkpointed_step: int = 0
    """Samples of steps before this one will never be asked for again."""
    wait_s: float = 0.0
    """How long the trainer waited for samples while the device was its own."""
    train_s: float = 0.0
    """How long it trained."""


@message
class Event(Message):
    """Anyone -> people: something happened. Best effort; nothing decides on it."""

    kind: str
    at: float
    source: str
    fields: dict[str, Any] = {}


# --- groups to generate -----------------------------------------------------------------------------------------------


class Sampling(Message):
    """How to draw tokens. `logprobs` that come back are of exactly this distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: Annotated[tuple[int, ...], Strict(False)] = ()


@message
class GroupRequested(Message):
    """Trainer or REST -> manager: generate `n` completions of one prompt. Idempotent on `group`."""

    job_id: str
    group: int
    """Packed id of the group's sample 0 (`shared.ids.SampleId`); sample i is `group + i`."""
    n: int
    prompt: bytes
    """int32 column of prompt token ids."""
    sampling: Sampling
    version: int
    """The weight version that is to be trained on it, and the newest one that may generate it."""
    seed: int
    max_staleness: int = 0
    """Versions down to `version - max_staleness` may generate it."""
    expires_at: float = 0.0
    """When a client's request is given up, which any version may generate; 0: the trainer's."""
    near: str = ""
    """A worker that may have the prompt's beginning in its cache: it gets the samples first, if it can."""


# --- the token log ----------------------------------------------------------------------------------------------------
# One stream, in one order, is the whole truth about samples in flight: the manager's ledger is a fold over it.


@message
class Admitted(Message):
    """Manager -> log: a group was taken from `rollouts.requested`."""

    request: GroupRequested


@message
class Placed(Message):
    """Manager -> log: these samples now belong to `worker`. Raises each sample's attempt, which fences its last owner.

    Written in the same transaction as the worker's `Assign`.
    """

    worker: str
    samples: bytes
    """uint64 column."""
    attempts: bytes
    """uint32 column: the attempt that this placement begins, from 1."""
    offsets: bytes
    """uint32 column: how many tokens the ledger held, which the worker got with the assignment."""


@message
class TokenFrame(Message):
    """Worker -> log: tokens made since the worker's last flush, for all its samples at once.

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
    """uint32 column: the weight version that made the row's tokens."""
    finish: bytes
    """uint8 column of FINISH_* codes."""
    tokens: bytes
    """int32 column."""
    logprobs: bytes
    """float32 column: log-probability of each token under the distribution it was drawn from."""


@message
class SampleFailed(Message):
    """Worker -> log: this sample itself cannot be generated (say, the prompt is too long). Fenced like a frame row.

    Manager -> log: `worker` said that its engine died or hung while it ran this sample, which may have been the cause.
    """

    worker: str
    sample: int
    attempt: int
    reason: str


@message
class Closed(Message):
    """Manager -> log: these samples were delivered to the trainer, or dropped; nothing more of them counts.

    Written in the same transaction as the delivery.
    """

    samples: bytes
    """uint64 column."""


@message
class Restated(Message):
    """Manager -> log: one live sample, whole, so that everything older of it may be trimmed (log compaction)."""

    request: GroupRequested
    """The group's request with `n` as in the original."""
    sample: int
    attempt: int
    worker: str
    """Its current owner; empty while it waits."""
    tokens: bytes
    logprobs: bytes
    spans: list[Span]
    """(worker, weight version, number of tokens), in order."""
    failures: int = 0
    failed_on: list[str] = []
    """Names of the workers on which it failed."""


# --- manager -> worker ------------------------------------------------------------------------------------------------


class Assignment(Message):
    """One sample to generate, from its prompt or from where somebody else stopped."""

    sample: int
    attempt: int
    prompt: bytes
    """int32 column."""
    tokens: bytes
    """int32 column: completion tokens made so far; the worker's first new token has this offset."""
    sampling: Sampling
    seed: int


@message
class Assign(Message):
    """Manager -> worker: generate these, with this weight version."""

    job_id: str
    version: int
    samples: list[Assignment]


@message
class Revoke(Message):
    """Manager -> worker: stop these samples and forget them; later frames of them will not count."""

    samples: bytes
    """uint64 column."""
    attempts: bytes
    """uint32 column."""


@message
class Release(Message):
    """Manager -> worker: stop these samples, flush what they have, and end each one's row with FINISH_RELEASED.

    They go on elsewhere without a token made again. A sample that is not held under this attempt is passed over.
    """

    samples: bytes
    """uint64 column."""
    attempts: bytes
    """uint32 column."""


@message
class UseVersion(Message):
    """Manager -> worker: pull this version of this job's weights, verify, load, serve. Ordered before its `Assign`s."""

    job_id: str
    version: int
    in_flight: InFlight = "recompute"


@message
class Suspend(Message):
    """Manager -> reserved worker: the trainer needs the device. Stop, flush, keep nothing running, beat `suspended`."""

    step: int


@message
class Resume(Message):
    """Manager -> reserved worker: generate again."""

    step: int


@message
class Drain(Message):
    """Manager -> worker: take nothing new, flush, hand off what is left, leave, exit 0."""

    reason: str = ""


@message
class Dismissed(Message):
    """Manager -> worker: you were declared lost and your samples are elsewhere. Drop everything and join anew."""

    reason: str


# --- worker -> manager ------------------------------------------------------------------------------------------------


@message
class WorkerJoined(Message):
    """Worker -> manager: a new incarnation exists and reads `worker.{id}.commands` from its start."""

    worker: str
    role: Role
    kind: str
    """What sort of machine or engine; profiles are kept per kind."""
    slots: int
    """How many samples the engine runs at once."""
    host: str
    pid: int
    price_per_hour: float
    at: float
    trainer: str = ""
    """Reserved: name of the trainer whose device it shares; empty where there is one trainer only."""
    kv_tokens: int = 0
    """How many tokens, prompts included, its KV cache holds at once; 0 where it does not know yet: see `WorkerBeat`."""


@message
class WorkerBeat(Message):
    """Worker -> manager: alive, and this is the load. Sent every beat interval and at each change of state."""

    worker: str
    state: WorkerState
    job_id: str
    version: int
    """The version that the engine serves; -1 before the first."""
    running: int
    pending: int
    tokens_per_s: float
    at: float
    resident_bytes: int = 0
    """Memory of its process; 0 where that is not known."""
    device_used_bytes: int = 0
    """Memory in use on the engine's device, by whomever; 0 where it has none of its own."""
    device_total_bytes: int = 0
    kv_tokens: int = 0
    """How many tokens, prompts included, its engine's KV cache holds at once; 0 where it does not say."""
    kv_row_tokens: int = 0
    """Not 0 where that cache is a rectangle (`shared.kv_rows`): the length at which any sample ends at the latest."""
    kv_page_tokens: int = 0
    """Not 0 where it is paged, and full pages that samples have in common, from their first token on, are kept once."""


@message
class WorkerNotice(Message):
    """Worker -> manager: the machine will be taken away in `lead_s`; the worker is handing off."""

    worker: str
    lead_s: float
    reason: str
    at: float


@message
class WorkerLeft(Message):
    """Worker -> manager: flushed everything and gone. Its samples may be placed elsewhere at once."""

    worker: str
    reason: str
    at: float
    died_with: bytes = b""
    """uint64 column: samples that its engine ran when it died or hung; empty after any other end."""


# --- manager -> trainer -----------------------------------------------------------------------------------------------


@message
class SampleFinished(Message):
    """Manager -> trainer: one complete sample. Exactly once on `sample`."""

    sample: int
    tokens: bytes
    """int32 column: the completion, with its stop token when there is one."""
    logprobs: bytes
    """float32 column."""
    finish: FinishReason
    spans: list[Span]
    """(worker, weight version, number of tokens), in order; the numbers add up to the length."""
    attempts: int
    group_done: bool
    """True on the last sample of its group to be delivered."""


@message
class SampleDropped(Message):
    """Manager -> trainer: this sample will not come, and why. Exactly once on `sample`, instead of `SampleFinished`."""

    sample: int
    reason: str
    group_done: bool


@message
class GroupOpened(Message):
    """Trainer -> its successor: an environment began a group's conversations, or why it did not. The first counts."""

    group: int
    prompt_digest: bytes
    """Of what the samples begin with: other prompts than these would not belong to what was generated."""
    reason: str = ""
    """Why the group is dropped; empty where it is not."""
    detail: str = ""


@message
class TurnAnswered(Message):
    """Trainer -> its successor: what an environment answered to one turn. The first one of a sample counts.

    Written in one transaction with the request of the next turn, if there is one.
    """

    sample: int
    """Of the turn."""
    tokens: bytes = b""
    """int32 column: what follows the turn in the next one's prompt; empty with the last."""
    reward: float = 0.0
    over: Literal["", "done", "cut"] = ""
    """Whether the conversation has ended: by the environment, or by a limit."""
    reason: str = ""
    """Why the group is dropped; empty where it is not."""
    detail: str = ""


@message
class SeedingEnded(Message):
    """Manager -> trainer: the reserved engines are suspended; the device is yours for this step."""

    step: int
    window_s: float
    reason: Literal["window", "finished", "no_reserved"]


@message
class SeedingReopened(Message):
    """Manager -> trainer: nobody else is left to generate; the reserved engines go on, start no new micro-batch."""

    step: int


# --- weights ----------------------------------------------------------------------------------------------------------


@message
class WeightsCommitted(Message):
    """Weight store -> all: this version is complete and verified."""

    job_id: str
    version: int
    manifest_digest: str
    n_bytes: int
    at: float


# --- what could not be used -------------------------------------------------------------------------------------------


@message
class DeadLetter(Message):
    """Anyone -> people: a message that did not decode, or failed too often, with the reason."""

    stream: str
    entry_id: str
    consumer: str
    reason: str
    body: bytes
    at: float
