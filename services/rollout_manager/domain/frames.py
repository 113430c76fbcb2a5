"""Token frames in columns: decodes many at once, and selects the rows that extend samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import JOB_SHIFT, is_served
from rlboost.shared.messages import FINISH_NONE, FINISH_RELEASED, GroupRequested, TokenFrame
from rlboost.shared.wire import F32, I32, TOP, U8, U32, U64, RoutedShape, ints

# --- frame decoder ----------------------------------------------------------------------------------------------------
#
# Token frames as columns of numbers, many frames at once.


Ints = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

TOKEN_BYTES = I32.itemsize
MAX_LOGPROB = 1e-3
"""A log-probability is 0 at most, but for rounding."""
MAX_ROWS = 1 << 16
"""Of one frame: more than fit into the largest that workers send."""


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
    top_bytes: Ints
    """How many bytes of top log-probabilities each row has."""
    routed_starts: Ints
    """Where the row's bytes begin in its frame's `routed_experts`."""
    top_starts: Ints
    """Where the row's bytes begin in its frame's `top_logprobs`."""
    invalid: Ints
    """Rows with a negative token id, a log-probability not finite or above `MAX_LOGPROB`, or an unknown finish."""


def decode_frames(frames: Sequence[TokenFrame]) -> FrameRows:
    """Return the rows of frames.

    Raises:
        Unprocessable: a frame is too long or its columns differ in length; apply frames one by one to find which.

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
    first_rows = last_rows - n_rows
    routed_bytes, top_bytes = _row_bytes(frames, "routed_bytes", n_rows), _row_bytes(frames, "top_bytes", n_rows)
    return FrameRows(
        frames=frames,
        first_rows=first_rows,
        samples=_column(frames, "samples", U64),
        attempts=_column(frames, "attempts", U32),
        offsets=_column(frames, "offsets", U32).astype(np.int64),
        counts=counts,
        versions=_column(frames, "versions", U32),
        finish=finish,
        starts=ends - counts,
        tokens=tokens,
        logprobs=logprobs,
        routed_bytes=routed_bytes,
        top_bytes=top_bytes,
        routed_starts=_starts_in_frames(routed_bytes, n_rows),
        top_starts=_starts_in_frames(top_bytes, n_rows),
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
        n <= MAX_ROWS
        and len(frame.samples) == n * U64.itemsize
        and len(frame.attempts) == len(frame.offsets) == len(frame.counts) == len(frame.versions) == n * U32.itemsize
        and len(frame.tokens) == len(frame.logprobs)
        and len(frame.tokens) % TOKEN_BYTES == 0
        and len(frame.routed_bytes) in {0, n * U32.itemsize}
        and sum(ints(frame.routed_bytes, U32)) == len(frame.routed_experts)
        and len(frame.top_bytes) in {0, n * U32.itemsize}
        and sum(ints(frame.top_bytes, U32)) == len(frame.top_logprobs)
    )


def _row_bytes(frames: Sequence[TokenFrame], name: str, n_rows: Ints) -> Ints:
    columns = [getattr(frame, name) for frame in frames]
    if not any(columns):
        return np.zeros(int(n_rows.sum()), np.int64)
    whole = [column or bytes(n * U32.itemsize) for column, n in zip(columns, n_rows.tolist(), strict=True)]
    return np.frombuffer(b"".join(whole), U32).astype(np.int64)


def _starts_in_frames(row_bytes: Ints, n_rows: Ints) -> Ints:
    """Return where each row's bytes begin in its frame's column."""
    starts = np.concatenate(([0], row_bytes.cumsum()))
    first_rows = n_rows.cumsum() - n_rows
    within: Ints = starts[:-1] - np.repeat(starts[first_rows], n_rows)
    return within


def _mismatch(frame: TokenFrame) -> Unprocessable:
    n = len(frame.finish)
    why = f"it has {n} rows, and frames have at most {MAX_ROWS}" if n > MAX_ROWS else "its columns differ in length"
    return Unprocessable(f"frame {frame.seq} of {frame.worker}: {why}")


def _column(frames: Sequence[TokenFrame], name: str, dtype: np.dtype[Number]) -> npt.NDArray[Number]:
    return np.frombuffer(b"".join([getattr(frame, name) for frame in frames]), dtype)


# --- row selection ----------------------------------------------------------------------------------------------------
#
# Selects the rows of token frames that extend samples, many frames at once.
#
# A loaded manager reads thousands of rows a turn, and nearly all of them simply continue their samples. So the next
# row that each sample expects is stored in columns too, all rows are compared with it in a few array operations, and
# only irregular rows are looked at one by one. Measured figures: docs/notes/measurements.md.


Bools = npt.NDArray[np.bool_]

NO_SLOT = 0
"""The slot of rows whose sample is not in flight."""
_NO_WORKER = 0
"""The number of an attempt without a worker, and before the first attempt: no row counts."""
_UNKNOWN_WORKER = -1
"""The number of a worker that no attempt was given to."""
NO_VERSION = 0xFFFF_FFFF
"""The version of a sample that no row has extended under its current attempt. Only the version is compared, not the
worker: an attempt belongs to one worker."""
_INITIAL_SLOTS = 1024


class Limits(NamedTuple):
    """What a sample's request allows in its rows."""

    vocab_size: int
    """Token ids are below this."""
    max_tokens: int
    oldest_version: int
    newest_version: int
    """Limits of the weight versions that may generate it."""
    layers: int = 0
    experts_per_token: int = 0
    experts: int = 0
    """The `RoutedShape`, zeros if the request does not ask for routed experts."""
    top_logprobs: int = 0
    """How many top log-probabilities each token has."""


UNLIMITED = Limits(1 << 31, 1 << 32, 0, NO_VERSION - 1)


def limits_of(request: GroupRequested) -> Limits:
    """Return what the rows of a request's samples may contain; any version may generate a client's request."""
    vocab_size, max_tokens = request.vocab_size or UNLIMITED.vocab_size, request.sampling.max_tokens
    if is_served(request.group):
        versions = UNLIMITED.oldest_version, UNLIMITED.newest_version
        return Limits(vocab_size, max_tokens, *versions, top_logprobs=request.sampling.top_logprobs)
    oldest, shape = max(0, request.version - request.max_staleness), request.sampling.routed_experts
    return Limits(
        vocab_size, max_tokens, oldest, request.version, *(shape if len(shape) == len(RoutedShape._fields) else ())
    )


class Row(NamedTuple):
    """One row that needs a closer look. The bytes are the tokens and log-probabilities that it carries."""

    slot: int
    worker: str
    version: int
    offset: int
    tokens: memoryview
    logprobs: memoryview
    finish: int
    routed_experts: bytes
    top_logprobs: bytes


class Selection(NamedTuple):
    """Rows sorted by what they do. Those in `appends`, `new_spans` and `ended` continue their samples without a gap."""

    appends: Iterable[tuple[int, int, int]]
    """(Slot, start, end) of each extended sample: its bytes of `tokens` and `logprobs`, its rows joined."""
    tokens: memoryview
    logprobs: memoryview
    new_spans: list[tuple[int, str, int, int]]
    """(Slot, worker, version, first token) where the version differs from that of the tokens before."""
    ended: list[tuple[int, int]]
    """(Slot, finish) in the log's order."""
    routed: list[tuple[int, bytes]]
    """(Slot, routed experts) of those that ended with some."""
    top_logprobs: list[tuple[int, bytes]]
    """(Slot, top log-probabilities) of the rows in `appends` that have some, in the log's order."""
    irregular: list[Row]
    """All rows of samples where some row repeats tokens, leaves a gap or comes after the end; in the log's order."""
    refused: list[tuple[int, int]]
    """(Sample id, tokens) of rows of an earlier attempt, of another worker, or of a sample that is not in flight."""
    invalid: list[tuple[int, str, int]]
    """(Slot, worker, tokens) of rows that no engine sends: `FrameRows.invalid`, and those beyond their `Limits`."""
    accepted: dict[int, int]
    """Job number -> tokens in `appends`."""


class ExpectedRows:
    """The next row that each sample in flight expects. A sample has a slot for as long as it is in flight.

    Workers are numbered: a row counts only if its frame's worker is the one of the sample's current attempt.
    """

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 1
        self._numbers: dict[str, int] = {}
        """Worker -> its number, from 1."""
        self.attempt = np.zeros(_INITIAL_SLOTS, U32)
        self.worker = np.zeros(_INITIAL_SLOTS, np.int64)
        self.length = np.zeros(_INITIAL_SLOTS, np.int64)
        self.ended = np.zeros(_INITIAL_SLOTS, np.bool_)
        self.version = np.zeros(_INITIAL_SLOTS, U32)
        self._limits = np.zeros((_INITIAL_SLOTS, len(Limits._fields)), np.int64)
        """A `Limits` per slot."""
        self.limit(NO_SLOT, UNLIMITED)

    def limit(self, slot: int, limits: Limits) -> None:
        """Set what the rows of a slot may contain."""
        self._limits[slot] = limits

    def expect(
        self, sample_id: int, attempt: int, worker: str, length: int, *, ended: bool, version: int = NO_VERSION
    ) -> int:
        """Set what the sample's next row must look like; return its slot."""
        slot = self._slot_of.get(sample_id)
        if slot is None:
            slot = self._slot_of[sample_id] = self._free.pop() if self._free else self._new_slot()
        self.attempt[slot], self.length[slot] = attempt, length
        self.worker[slot] = self._numbers.setdefault(worker, len(self._numbers) + 1) if worker else _NO_WORKER
        self.ended[slot], self.version[slot] = ended, version
        return slot

    def forget(self, sample_id: int) -> int:
        """Free the slot of a sample; return the slot."""
        slot = self._slot_of.pop(sample_id)
        self._free.append(slot)
        return slot

    def select(self, frames: Sequence[TokenFrame]) -> Selection:
        """Sort the rows of frames by what they do, and expect what comes after those that continue their samples.

        Raises:
            Unprocessable: the columns of a frame differ in length, and nothing was changed.

        """
        rows = decode_frames(frames)
        slots = self._slots_of(frames)
        current = self.attempt[slots] == rows.attempts
        current &= self.worker[slots] == self._workers_of(rows)  # that of `NO_SLOT` is `_NO_WORKER`
        refused = np.flatnonzero(~current) if not current.all() else np.zeros(0, np.int64)
        invalid = rows.invalid
        if (beyond := self._beyond_limits(rows, slots)).size:
            invalid = np.union1d(invalid, beyond)
        invalid = invalid[current[invalid]]
        current[invalid] = False
        matching = np.flatnonzero(current)
        matching = matching[_stable_order(slots[matching])]
        slot, offset = slots[matching], rows.offsets[matching]
        first = _first_of_each(slot)
        continues = offset == _or_before(first, self.length[slot], offset + rows.counts[matching])
        continues &= ~_or_before(first, self.ended[slot], _is_end(rows.finish[matching]))
        irregular = matching[:0]
        if not continues.all():
            odd = np.isin(slot, slot[~continues])
            matching, irregular = matching[~odd], np.sort(matching[odd])
        return self._advance(
            rows,
            slots,
            matching,
            irregular=[_row(rows, row, int(slots[row])) for row in irregular.tolist()],
            refused=[(int(rows.samples[row]), int(rows.counts[row])) for row in refused.tolist()],
            invalid=[(int(slots[row]), _worker_of(rows, row), int(rows.counts[row])) for row in invalid.tolist()],
        )

    def _beyond_limits(self, rows: FrameRows, slots: Ints) -> Ints:
        """Return the rows with tokens that their samples' requests do not allow."""
        vocab_size, max_tokens, oldest_version, newest_version, *_, top_logprobs = self._limits[slots].T
        beyond = rows.offsets + rows.counts > max_tokens
        beyond |= rows.top_bytes != rows.counts * top_logprobs * TOP.itemsize
        beyond |= (rows.counts > 0) & ((rows.versions < oldest_version) | (rows.versions > newest_version))
        found = np.flatnonzero(beyond)
        if rows.routed_bytes.any():
            found = np.union1d(found, self._with_invalid_routing(rows, slots))
        if rows.top_bytes.any():
            found = np.union1d(found, _with_invalid_top_logprobs(rows, vocab_size))
        if len(rows.tokens) and rows.tokens.max() >= vocab_size.min():
            unknown = rows.tokens >= np.repeat(vocab_size, rows.counts)
            found = np.union1d(found, np.repeat(np.arange(len(slots)), rows.counts)[unknown])
        return found

    def _with_invalid_routing(self, rows: FrameRows, slots: Ints) -> Ints:
        """Return the rows whose routed experts do not fit a completion of the requested shape that ends there."""
        invalid = []
        for row in np.flatnonzero(rows.routed_bytes).tolist():
            shape = RoutedShape(*Limits(*self._limits[slots[row]].tolist())[4:-1])
            n_tokens = int(rows.offsets[row] + rows.counts[row])
            ends = _is_end(rows.finish[row : row + 1])[0]
            if not (ends and shape.experts and shape.is_valid(_routed_experts_of(rows, row), n_tokens)):
                invalid.append(row)
        return np.array(invalid, np.int64)

    def _advance(
        self,
        rows: FrameRows,
        slots: Ints,
        regular: Ints,
        *,
        irregular: list[Row],
        refused: list[tuple[int, int]],
        invalid: list[tuple[int, str, int]],
    ) -> Selection:
        """Return the selection with these regular rows, sorted by slot, and expect what comes after them."""
        extending = regular[rows.counts[regular] > 0]
        slot, counts, versions = slots[extending], rows.counts[extending], rows.versions[extending]
        first = _first_of_each(slot)
        changes = np.flatnonzero(versions != _or_before(first, self.version[slot], versions))
        tokens, logprobs = _gather(rows, extending)
        heads = np.flatnonzero(first)
        ends = ((np.add.reduceat(counts, heads) if len(heads) else heads).cumsum() * TOKEN_BYTES).tolist()
        starts = [0, *ends[:-1]] if ends else []
        # Of several rows of one slot, the last is written last.
        self.length[slot] = rows.offsets[extending] + counts
        self.version[slot] = versions
        ending = np.sort(regular[rows.finish[regular] != FINISH_NONE])
        self.ended[slots[ending[_is_end(rows.finish[ending])]]] = True
        return Selection(
            appends=zip(slot[heads].tolist(), starts, ends, strict=True),
            tokens=tokens,
            logprobs=logprobs,
            new_spans=[
                (int(slot[i]), _worker_of(rows, int(extending[i])), int(versions[i]), int(rows.offsets[extending[i]]))
                for i in changes.tolist()
            ],
            ended=list(zip(slots[ending].tolist(), rows.finish[ending].tolist(), strict=True)),
            routed=[
                (int(slots[row]), _routed_experts_of(rows, row))
                for row in ending[rows.routed_bytes[ending] > 0].tolist()
            ],
            top_logprobs=[
                (int(slots[row]), _top_logprobs_of(rows, row))
                for row in extending[rows.top_bytes[extending] > 0].tolist()
            ],
            irregular=irregular,
            refused=refused,
            invalid=invalid,
            accepted=_tokens_by_job(rows.samples[extending], counts),
        )

    def _slots_of(self, frames: Sequence[TokenFrame]) -> Ints:
        """Return the slot of each row, `NO_SLOT` where the sample is not in flight."""
        slot_of = self._slot_of.get
        known: dict[bytes, Ints] = {}  # consecutive frames of a worker mostly name the same samples
        found = []
        for frame in frames:
            slots = known.get(frame.samples)
            if slots is None:
                slots = np.array([slot_of(sample, NO_SLOT) for sample in ints(frame.samples, U64)], np.int64)
                known[frame.samples] = slots
            found.append(slots)
        return np.concatenate(found)

    def _workers_of(self, rows: FrameRows) -> Ints:
        """Return the number of each row's worker."""
        numbers = [self._numbers.get(frame.worker, _UNKNOWN_WORKER) for frame in rows.frames]
        n_rows = np.diff(rows.first_rows, append=len(rows.samples))
        return np.repeat(np.array(numbers, np.int64), n_rows)

    def _new_slot(self) -> int:
        slot, self._used = self._used, self._used + 1
        if slot == len(self.attempt):
            for name in ("attempt", "worker", "length", "ended", "version"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            self._limits = np.concatenate((self._limits, np.zeros_like(self._limits)))
        return slot


def _row(rows: FrameRows, row: int, slot: int) -> Row:
    of_row = slice(int(rows.starts[row]), int(rows.starts[row] + rows.counts[row]))
    tokens, logprobs = (memoryview(column[of_row].tobytes()) for column in (rows.tokens, rows.logprobs))
    version, offset, finish = int(rows.versions[row]), int(rows.offsets[row]), int(rows.finish[row])
    columns = _routed_experts_of(rows, row), _top_logprobs_of(rows, row)
    return Row(slot, _worker_of(rows, row), version, offset, tokens, logprobs, finish, *columns)


def _frame_of(rows: FrameRows, row: int) -> TokenFrame:
    return rows.frames[int(np.searchsorted(rows.first_rows, row, "right")) - 1]


def _worker_of(rows: FrameRows, row: int) -> str:
    """Return the worker that sent a row."""
    return _frame_of(rows, row).worker


def _gather(rows: FrameRows, chosen: Ints) -> tuple[memoryview, memoryview]:
    """Return the tokens and log-probabilities of these rows, concatenated, as bytes."""
    counts = rows.counts[chosen]
    ends = np.cumsum(counts)
    index = np.repeat(rows.starts[chosen] - (ends - counts), counts)
    index += np.arange(len(index))
    return memoryview(rows.tokens.take(index).tobytes()), memoryview(rows.logprobs.take(index).tobytes())


def _routed_experts_of(rows: FrameRows, row: int) -> bytes:
    """Return the routed experts of a row, empty if it has none."""
    start = int(rows.routed_starts[row])
    return _frame_of(rows, row).routed_experts[start : start + int(rows.routed_bytes[row])]


def _top_logprobs_of(rows: FrameRows, row: int) -> bytes:
    """Return the top log-probabilities of a row, empty if it has none."""
    start = int(rows.top_starts[row])
    return _frame_of(rows, row).top_logprobs[start : start + int(rows.top_bytes[row])]


def _with_invalid_top_logprobs(rows: FrameRows, vocab_size: Ints) -> Ints:
    """Return the rows whose top log-probabilities have a token id or a number that no engine sends."""
    invalid = []
    for row in np.flatnonzero(rows.top_bytes).tolist():
        column = _top_logprobs_of(rows, row)
        top = np.frombuffer(column, TOP) if len(column) % TOP.itemsize == 0 else np.full(1, (-1, 0), TOP)
        valid = (top["token"] >= 0) & (top["token"] < vocab_size[row]) & (top["logprob"] <= MAX_LOGPROB)
        if not valid.all():  # NaN compares as false
            invalid.append(row)
    return np.array(invalid, np.int64)


def _is_end(finish: npt.NDArray[np.uint8]) -> Bools:
    ends: Bools = (finish != FINISH_NONE) & (finish != FINISH_RELEASED)
    return ends


def _first_of_each(slot: Ints) -> Bools:
    """Return, for sorted slots, which entries are the first of their slot."""
    first = np.ones(len(slot), np.bool_)
    np.not_equal(slot[1:], slot[:-1], out=first[1:])
    return first


def _or_before(first: Bools, at_first: npt.NDArray[Number], otherwise: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return `at_first` where `first` is true, and the preceding entry of `otherwise` elsewhere."""
    before = np.empty_like(otherwise)
    before[1:] = otherwise[:-1]
    return np.where(first, at_first, before)


def _stable_order(slots: Ints) -> Ints:
    """Return a stable order by slot. numpy sorts 16-bit numbers by radix, ten times as fast as wider ones."""
    order = np.argsort(slots.astype(np.uint16), kind="stable")
    if len(slots) and int(slots.max()) >> 16:
        order = order[np.argsort((slots[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def _tokens_by_job(samples: npt.NDArray[np.uint64], counts: Ints) -> dict[int, int]:
    tokens: dict[int, int] = {}
    jobs = samples >> JOB_SHIFT
    while jobs.size:
        job, same = int(jobs[0]), jobs == jobs[0]
        tokens[job] = int(counts[same].sum())
        jobs, counts = jobs[~same], counts[~same]
    return tokens
