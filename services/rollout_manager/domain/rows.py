"""Rows of token frames, many frames at once, as columns of numbers.

A manager under load reads thousands of rows a turn, nearly all of which simply continue their samples. So what the next
row of each sample must look like is kept in columns too, all rows are compared with it in a few operations, and only
rows that are out of the ordinary are looked at one by one. Measured figures: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shared.columns import F32, I32, U8, U32, U64, ints
from shared.errors import Bury
from shared.messages import FINISH_NONE, FINISH_RELEASED, TokenFrame

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)

NOBODY = 0
"""The slot of rows whose sample is not in flight."""
NO_VERSION = 0xFFFF_FFFF
"""The version of a sample that no row has extended under its current attempt. Who sends its rows need not be compared:
an attempt is one worker's."""
_FIRST_SLOTS = 1024


class Expected:
    """What the next row of each sample in flight must look like. A sample has a slot for as long as it is in flight."""

    def __init__(self) -> None:
        """Start empty."""
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 1
        self.attempt = np.zeros(_FIRST_SLOTS, U32)
        self.length = np.zeros(_FIRST_SLOTS, np.int64)
        self.ended = np.zeros(_FIRST_SLOTS, np.bool_)
        self.version = np.zeros(_FIRST_SLOTS, U32)

    def expect(self, sample_id: int, attempt: int, length: int, *, ended: bool, version: int = NO_VERSION) -> int:
        """Note what the sample's next row must look like; return its slot."""
        slot = self._slot_of.get(sample_id)
        if slot is None:
            slot = self._slot_of[sample_id] = self._free.pop() if self._free else self._new_slot()
        self.attempt[slot], self.length[slot] = attempt, length
        self.ended[slot], self.version[slot] = ended, version
        return slot

    def forget(self, sample_id: int) -> int:
        """Expect nothing more of a sample; return the slot that it had."""
        slot = self._slot_of.pop(sample_id)
        self._free.append(slot)
        return slot

    def slots(self, frames: Sequence[TokenFrame]) -> Ints:
        """Return the slot of each row, `NOBODY` where the sample is not in flight."""
        slot_of = self._slot_of.get
        known: dict[bytes, Ints] = {}  # a worker's frames mostly name the same samples as its last
        found = []
        for frame in frames:
            slots = known.get(frame.samples)
            if slots is None:
                slots = np.array([slot_of(sample, NOBODY) for sample in ints(frame.samples, U64)], np.int64)
                known[frame.samples] = slots
            found.append(slots)
        return np.concatenate(found)

    def _new_slot(self) -> int:
        slot, self._used = self._used, self._used + 1
        if slot == len(self.attempt):
            for name in ("attempt", "length", "ended", "version"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        return slot


class Rows(NamedTuple):
    """The columns of several frames, one behind the other. A row is an index into them."""

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

    def worker(self, row: int) -> str:
        """Return who sent the row."""
        return self.frames[int(np.searchsorted(self.first_rows, row, "right")) - 1].worker

    def gather(self, rows: Ints) -> tuple[memoryview, memoryview]:
        """Return the tokens and log-probabilities of these rows, one row behind the other, as bytes."""
        counts = self.counts[rows]
        ends = np.cumsum(counts)
        index = np.repeat(self.starts[rows] - (ends - counts), counts)
        index += np.arange(len(index))
        return memoryview(self.tokens.take(index).tobytes()), memoryview(self.logprobs.take(index).tobytes())


def rows_of(frames: Sequence[TokenFrame]) -> Rows:
    """Return the rows of frames.

    Raises:
        Bury: the columns of a frame do not fit each other; with several frames, give them one by one to know which.

    """
    for frame in frames:
        if not _columns_fit(frame):
            raise _misfit(frame)
    counts = _column(frames, "counts", U32).astype(np.int64)
    ends = np.cumsum(counts)
    n_rows = np.array([len(frame.finish) for frame in frames])
    last_rows = np.cumsum(n_rows)
    tokens_to = np.concatenate(([0], ends))[last_rows]
    made = np.cumsum([len(frame.tokens) // I32.itemsize for frame in frames])
    if (wrong := np.flatnonzero(tokens_to != made)).size:
        raise _misfit(frames[int(wrong[0])])
    return Rows(
        frames=frames,
        first_rows=last_rows - n_rows,
        samples=_column(frames, "samples", U64),
        attempts=_column(frames, "attempts", U32),
        offsets=_column(frames, "offsets", U32).astype(np.int64),
        counts=counts,
        versions=_column(frames, "versions", U32),
        finish=_column(frames, "finish", U8),
        starts=ends - counts,
        tokens=_column(frames, "tokens", I32),
        logprobs=_column(frames, "logprobs", F32),
    )


def _columns_fit(frame: TokenFrame) -> bool:
    n = len(frame.finish)
    return (
        len(frame.samples) == n * U64.itemsize
        and len(frame.attempts) == len(frame.offsets) == len(frame.counts) == len(frame.versions) == n * U32.itemsize
        and len(frame.tokens) == len(frame.logprobs)
        and len(frame.tokens) % I32.itemsize == 0
    )


def _misfit(frame: TokenFrame) -> Bury:
    return Bury(f"frame {frame.seq} of {frame.worker}: its columns do not fit each other")


def _column(frames: Sequence[TokenFrame], name: str, dtype: np.dtype[Number]) -> npt.NDArray[Number]:
    return np.frombuffer(b"".join([getattr(frame, name) for frame in frames]), dtype)


class Sorted(NamedTuple):
    """Rows under their samples' current attempts, by what is to be done with them."""

    regular: Ints
    """Rows that continue their sample, sorted by slot, those of one slot in the order of the log."""
    odd: Ints
    """All rows of samples of which some row repeats tokens, leaves a gap or comes after the end; in the log's order."""
    refused: Ints
    """Rows of no sample in flight or of an attempt that is not the current one."""


def sort_out(rows: Rows, slots: Ints, expected: Expected) -> Sorted:
    """Compare rows with what is expected of each slot."""
    current = expected.attempt[slots] == rows.attempts
    current &= slots != NOBODY
    taken = np.flatnonzero(current)
    refused = np.flatnonzero(~current) if len(taken) < len(slots) else taken[:0]
    taken = taken[_order(slots[taken])]
    slot, offset = slots[taken], rows.offsets[taken]
    first = first_of_each(slot)
    goes_on = offset == _or_before(first, expected.length[slot], offset + rows.counts[taken])
    finish = rows.finish[taken]
    ends = (finish != FINISH_NONE) & (finish != FINISH_RELEASED)
    goes_on &= ~_or_before(first, expected.ended[slot], ends)
    if goes_on.all():
        return Sorted(taken, taken[:0], refused)
    odd = np.isin(slot, slot[~goes_on])
    return Sorted(taken[~odd], np.sort(taken[odd]), refused)


def first_of_each(slot: Ints) -> Bools:
    """Return, for sorted slots, which entries are the first of theirs."""
    first = np.ones(len(slot), np.bool_)
    np.not_equal(slot[1:], slot[:-1], out=first[1:])
    return first


def changes(first: Bools, expected: npt.NDArray[np.uint32], values: npt.NDArray[np.uint32]) -> Ints:
    """Return where, for sorted slots, a value differs from the one before it, or from what is expected at the first."""
    return np.flatnonzero(values != _or_before(first, expected, values))


def _or_before(first: Bools, at_first: npt.NDArray[Number], otherwise: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return `at_first` where `first` says so, elsewhere the entry of `otherwise` before."""
    before = np.empty_like(otherwise)
    before[1:] = otherwise[:-1]
    return np.where(first, at_first, before)


def _order(slots: Ints) -> Ints:
    """Return a stable order by slot. Of 16-bit numbers numpy sorts by radix, ten times as fast as of wider ones."""
    order = np.argsort(slots.astype(np.uint16), kind="stable")
    if len(slots) and int(slots.max()) >> 16:
        order = order[np.argsort((slots[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def stretches(first: Bools, slot: Ints, counts: Ints) -> Iterator[tuple[int, int]]:
    """Yield, for sorted slots, each slot with how many tokens its rows have together."""
    heads = np.flatnonzero(first)
    return zip(slot[heads].tolist(), np.add.reduceat(counts, heads).tolist(), strict=True) if len(heads) else iter(())
