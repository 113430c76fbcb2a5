"""The token log: this one ordered stream defines the state of samples in flight.

The manager's ledger is a replay of it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlboost.shared.messages.codec import Attempt, Column32, Column64, Message, PackedId, Span, message
from rlboost.shared.messages.requests import GroupRequested

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_RELEASED = 0, 1, 2, 3
"""Codes of `TokenFrame.finish`: the sample continues; it ended with a stop token; it ended at `max_tokens`; the worker
released it because the manager reclaimed it (`Release`)."""


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
    """float32 column: log-probability of each token, as `Sampling` describes it."""
    routed_experts: bytes = b""
    """Routed experts (`RoutedShape`), concatenated. A row that ends its sample has those of the whole completion, if
    the request asks for them; all others have none."""
    routed_bytes: bytes = b""
    """uint32 column: the row's bytes of `routed_experts`; empty if no row has any."""
    top_logprobs: bytes = b""
    """Entries of `shared.wire.TOP`: for each token of a row whose request asks for `Sampling.top_logprobs`, that many,
    the most likely token first."""
    top_bytes: bytes = b""
    """uint32 column: the row's bytes of `top_logprobs`; empty if no row has any."""


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
    failed_on: list[str] = Field(default_factory=list)
    """Names of the workers on which it failed."""
    attempt_worker: str = ""
    """The worker of the current attempt, also after it lost the sample; empty if it has none."""
    failed_at: Annotated[int, Field(ge=0)] = 0
    """How many tokens it had at its last failure."""
    top_logprobs: bytes = b""
    """As in `TokenFrame`, for all tokens."""
