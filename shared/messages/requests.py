"""What is to be generated, and what the trainer gets for it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, Strict

from rlboost.shared.messages.codec import (
    Attempt,
    Column32,
    Count,
    Finite,
    HourlyPrice,
    Message,
    PackedId,
    Role,
    Seconds,
    Span,
    Version,
    message,
)

# --- The throughput of a kind of worker, as the manager has learned it ------------------------------------------------


class EngineProfile(Message):
    """Throughput of a kind of worker: a decode step takes `step_s + per_sample_s * samples + per_kv_token_s * tokens`.

    `samples` are in the batch, `tokens` in its KV cache.
    """

    kind: str
    role: Role
    workers: Count
    """Number of workers of this kind and role now."""
    slots: Count
    """The most samples that an engine runs at once."""
    kv_tokens: Count
    """The KV cache's capacity in tokens; 0 if unknown."""
    price_per_hour: HourlyPrice
    """Dollars for one worker; the median."""
    step_s: Seconds
    per_sample_s: Seconds
    per_kv_token_s: Seconds
    update_s: Seconds
    """Median time of their last weight updates."""
    update_pause_s: Seconds = 0.0
    """Part of it in which the engine could not generate: after the download."""


# --- Requests of the trainer ------------------------------------------------------------------------------------------


FinishReason = Literal["stop", "length"]
MAX_TOP_LOGPROBS = 20
MAX_IMAGE_BYTES = 4 << 20
"""An image is one chunk of the weight store."""
SamplingOption = Literal[
    "top_k",
    "min_p",
    "min_tokens",
    "logit_bias",
    "top_logprobs",
    "grammar",
    "stop",
    "batch_invariant",
    "images",
    "forced",
]
"""A field of `Sampling` that not every engine supports."""
RESUMES_GRAMMAR = "resumes_grammar"
"""What workers report besides options; those of releases that do not continue a grammar on vLLM lack it."""


Image = Annotated[tuple[str, Annotated[int, Field(ge=1, le=MAX_IMAGE_BYTES)]], Strict(False)]
"""(Digest, bytes) of a chunk of the weight store."""


class Sampling(Message):
    """Sampling parameters.

    The returned `logprobs` are of the whole distribution at this temperature, or at 1 if it is 0: `top_p` and the
    options change only what is drawn.
    """

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 256
    stop_token_ids: Annotated[tuple[int, ...], Strict(False)] = ()
    routed_experts: Annotated[tuple[Count, ...], Strict(False)] = ()
    """A `shared.wire.RoutedShape` if the experts of each token are to be returned; empty if not."""
    whole_logprobs: bool = False
    """True if the tokens are trained on: an engine that cannot report the log-probabilities described above fails the
    sample. Without it, such an engine reports those within the nucleus."""
    top_k: Count = 0
    """Sample from this many of the most likely tokens; 0: from all."""
    min_p: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Sample from the tokens that are at least this fraction as likely as the most likely one."""
    min_tokens: Count = 0
    """Sample no stop token before this many tokens."""
    logit_bias: Annotated[tuple[Annotated[tuple[Count, Finite], Strict(False)], ...], Strict(False)] = ()
    """(Token id, what is added to its logit)."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """Return this many of the most likely tokens at each position with their log-probabilities."""
    grammar: str = ""
    """What the completion must match, as a structural tag of xgrammar in JSON; empty for any text."""

    stop: Annotated[tuple[str, ...], Strict(False)] = ()
    """The completion ends with the token that completes one of these in its text, which has no special tokens."""
    batch_invariant: bool = False
    """True if no bit of a log-probability may depend on other requests of the engine, or on an earlier attempt."""
    images: Annotated[tuple[Image, ...], Strict(False)] = ()
    """(Digest, bytes) of each image of the prompt, a chunk of the weight store: see `shared.data.vision`."""
    forced: Column32 = b""
    """int32 column: the whole completion, `max_tokens` long, whose tokens are not drawn but only scored: each gets its
    log-probability. Empty: tokens are drawn."""

    @property
    def options(self) -> frozenset[SamplingOption]:
        """Return the options that are set: a worker that does not support one refuses the sample."""
        return frozenset(name for name in SAMPLING_OPTIONS if getattr(self, name))


SAMPLING_OPTIONS: tuple[SamplingOption, ...] = get_args(SamplingOption)


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
    vocab_size: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """Number of token ids of the model: a worker's token id that is not below it is invalid. 0: not checked."""
    session: PackedId = 0
    """The session of an agent that it is a turn of, with which it is stored once it is finished; 0 for none."""


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
    routed_experts: bytes = b""
    """The column of `shared.wire`; empty if not requested, or not known."""


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
class TurnOpened(Message):
    """Manager -> trainer: an agent's call opened a turn of a session; in one transaction with the turn's request.

    A call that an agent repeats after it was started again opens its turn again.
    """

    session: PackedId
    """Id of the session (`shared.job.agent`)."""
    sample: PackedId
    """The sample that is the turn."""
    parent: PackedId = 0
    """The turn that it continues; 0 for none."""
    tokens: Column32 = b""
    """int32 column: its prompt; with a parent, what follows the parent's prompt and completion in its prompt."""
    start: str = ""
    """Which start of the agent called."""


TurnRewards = Annotated[tuple[Annotated[tuple[PackedId, Finite], Strict(False)], ...], Strict(False)]
"""Turn of a session, and the reward of the rows that end with it, or continue it to a turn without one."""


@message
class SessionEnded(Message):
    """Trainer -> its successor: an agent has ended its session. The first record of a session counts."""

    session: PackedId
    start: str = ""
    """Which start of the agent came to this end: only its turns belong to the sample."""
    reward: float = 0.0
    over: Literal["done", "cut"] = "done"
    """`cut`: it ended at a limit."""
    reason: str = ""
    """The fault that ended it; empty otherwise."""
    detail: str = ""
    replaced_by: PackedId = 0
    """After a fault: the session that begins in its place, 0 if none does."""
    duration_s: Seconds = 0.0
    """Seconds since the trainer opened it, or, after a restart, opened it again."""
    rewards: TurnRewards = ()
    cost: Finite = 0.0


@message
class SessionRewarded(Message):
    """Manager, or trainer of the job whose agent calls this policy -> trainer: a session has ended elsewhere.

    The first record of a session counts.
    """

    session: PackedId
    start: str = ""
    """Which start of the agent came to this end."""
    reward: float = 0.0
    reason: Literal["", "infrastructure", "timeout", "crashed"] = ""
    """Why it has no reward; empty otherwise."""
    detail: str = ""
    rewards: TurnRewards = ()
    cost: Finite = 0.0
    over: Literal["done", "cut"] = "done"
    """See `SessionEnded`."""


@message
class TurnAnswered(Message):
    """Trainer -> its successor: an environment's reply to one turn. The first record of a sample counts.

    Written in one transaction with the request of the next turn, if there is one.
    """

    sample: PackedId
    """The sample that is the turn."""
    tokens: Column32 = b""
    """int32 column: what follows the turn in the next prompt; empty after the last turn."""
    reward: float = 0.0
    over: Literal["", "done", "cut"] = ""
    """Set if the conversation has ended: by the environment (`done`), or by a limit (`cut`)."""
    reason: str = ""
    """The fault that ended the conversation; empty otherwise."""
    detail: str = ""
    replaced_by: PackedId = 0
    """After a fault: the first turn of the conversation that begins in its place, 0 if none does."""
    cost: Finite = 0.0


@message
class SeedingEnded(Message):
    """Manager -> trainer: the reserved engines are suspended; the trainer may use the device for this step."""

    step: Count
    window_s: Seconds
    reason: Literal["window", "finished", "no_reserved"]
    engines: list[EngineProfile] = Field(default_factory=list)
    """Throughput of the kinds of workers that serve the job, as far as it is known."""


@message
class SeedingReopened(Message):
    """Manager -> trainer: no preemptible worker is left, or those left are too slow.

    The reserved engines resume, so start no new micro-batch.
    """

    step: Count
