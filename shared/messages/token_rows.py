"""The rows of a token frame, one by one. The ledger reads the columns of many frames at once instead."""

from __future__ import annotations

from collections.abc import Iterator

from rlboost.shared.messages import TokenFrame
from rlboost.shared.wire import U8, U32, U64, ints


def token_rows(frame: TokenFrame) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Return (sample, attempt, offset, count, version, finish) of each row; see `TokenFrame`.

    Raises:
        ValueError: the columns differ in length, or are cut off.

    """
    return zip(
        ints(frame.samples, U64),
        ints(frame.attempts, U32),
        ints(frame.offsets, U32),
        ints(frame.counts, U32),
        ints(frame.versions, U32),
        ints(frame.finish, U8),
        strict=True,
    )
