"""Token frames as columns of numbers, many frames at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import FINISH_RELEASED, TokenFrame
from rlboost.shared.wire.columns import F32, I32, U8, U32, U64, ints

Ints = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

TOKEN_BYTES = I32.itemsize
MAX_LOGPROB = 1e-3
"""A log-probability is 0 at most, but for rounding."""


class FrameRows(NamedTuple):
    """The columns of several frames, concatenated. A row is an index into them."""

    frames: Sequence[TokenFrame]
    first_rows: Ints
    """The first row of each frame."""
    samples: npt.NDArray[np.uint64]
    attempts: npt.NDArray[np.uint32]
    offsets: Ints
    counts: Ints
    versions: npt.NDArray[np.uint32]
    finish: npt.NDArray[np.uint8]
    starts: Ints
    """Index of the row's first token in `tokens` and `logprobs`."""
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    routed_bytes: Ints
    """How many bytes of routed experts each row has."""
    invalid: Ints
    """Rows with a negative token id, a log-probability not finite or above `MAX_LOGPROB`, or an unknown finish."""


def decode_frames(frames: Sequence[TokenFrame]) -> FrameRows:
    """Return the rows of frames.

    Raises:
        Unprocessable: the columns of a frame differ in length; apply frames one by one to find which.

    """
    for frame in frames:
        if not _columns_match(frame):
            raise _mismatch(frame)
    counts = _column(frames, "counts", U32).astype(np.int64)
    ends = np.cumsum(counts)
    n_rows = np.array([len(frame.finish) for frame in frames])
    last_rows = np.cumsum(n_rows)
    tokens_to = np.concatenate(([0], ends))[last_rows]
    tokens_sent = np.cumsum([len(frame.tokens) // TOKEN_BYTES for frame in frames])
    if (wrong := np.flatnonzero(tokens_to != tokens_sent)).size:
        raise _mismatch(frames[int(wrong[0])])
    tokens = _column(frames, "tokens", I32)
    logprobs = _column(frames, "logprobs", F32)
    finish = _column(frames, "finish", U8)
    return FrameRows(
        frames=frames,
        first_rows=last_rows - n_rows,
        samples=_column(frames, "samples", U64),
        attempts=_column(frames, "attempts", U32),
        offsets=_column(frames, "offsets", U32).astype(np.int64),
        counts=counts,
        versions=_column(frames, "versions", U32),
        finish=finish,
        starts=ends - counts,
        tokens=tokens,
        logprobs=logprobs,
        routed_bytes=_routed_bytes(frames, n_rows),
        invalid=_invalid_rows(counts, tokens, logprobs, finish),
    )


def _invalid_rows(
    counts: Ints, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], finish: npt.NDArray[np.uint8]
) -> Ints:
    valid = (tokens >= 0) & (logprobs <= MAX_LOGPROB) & (logprobs > -np.inf)  # NaN compares as false
    if valid.all() and (finish <= FINISH_RELEASED).all():
        return np.zeros(0, np.int64)
    with_invalid_tokens = np.repeat(np.arange(len(counts)), counts)[~valid]
    return np.union1d(with_invalid_tokens, np.flatnonzero(finish > FINISH_RELEASED))


def _columns_match(frame: TokenFrame) -> bool:
    n = len(frame.finish)
    return (
        len(frame.samples) == n * U64.itemsize
        and len(frame.attempts) == len(frame.offsets) == len(frame.counts) == len(frame.versions) == n * U32.itemsize
        and len(frame.tokens) == len(frame.logprobs)
        and len(frame.tokens) % TOKEN_BYTES == 0
        and len(frame.routed_bytes) in {0, n * U32.itemsize}
        and sum(ints(frame.routed_bytes, U32)) == len(frame.routed_experts)
    )


def _routed_bytes(frames: Sequence[TokenFrame], n_rows: Ints) -> Ints:
    if not any(frame.routed_bytes for frame in frames):
        return np.zeros(int(n_rows.sum()), np.int64)
    columns = [frame.routed_bytes or bytes(n * U32.itemsize) for frame, n in zip(frames, n_rows.tolist(), strict=True)]
    return np.frombuffer(b"".join(columns), U32).astype(np.int64)


def _mismatch(frame: TokenFrame) -> Unprocessable:
    return Unprocessable(f"frame {frame.seq} of {frame.worker}: its columns differ in length")


def _column(frames: Sequence[TokenFrame], name: str, dtype: np.dtype[Number]) -> npt.NDArray[Number]:
    return np.frombuffer(b"".join([getattr(frame, name) for frame in frames]), dtype)
