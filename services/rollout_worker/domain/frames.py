"""From generated tokens to frames, and from streamed frames to requests that a worker resumes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlboost.services.rollout_worker.domain.requests import (
    NOT_A_NUMBER,
    Emission,
    Request,
    RequestKey,
    finish_at_start,
    require_new,
    validation_error,
)
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_RELEASED,
    Message,
    SampleFailed,
    Sampling,
    TokenFrame,
)
from rlboost.shared.wire import F32, I32, U8, U32, U64, RoutedShape, pack

# --- Plans which slots copy keys and values from other slots instead of prefilling the same tokens again --------------
# The samples of a group share their prompt; migrated samples have tokens of their own after it. Keys and values of a
# token depend only on it and on the tokens before it, so slots with a common prefix have its keys and values in common.


Tokens = npt.NDArray[np.int32]

_MIN_SHARED = 16
"""Minimum length of a shared prefix, in tokens, unless the shorter prefix is contained whole: a shorter one is not
worth waiting for another slot's prefill."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How one slot gets the keys and values of its prefix."""

    slot: int
    donor: int
    """The slot to copy from; -1: none."""
    shared: int
    """Number of tokens to copy; the model computes the others."""
    length: int
    """Number of tokens of the prefix."""


class _Donor(NamedTuple):
    """A slot that others may copy from."""

    turn: int
    """The turn that fills it; -1 if it is filled already."""
    slot: int
    tokens: Tokens


def plan(new: Iterable[tuple[int, Tokens]], held: Iterable[tuple[int, Tokens]]) -> list[list[Prefill]]:
    """Plan the prefill of new slots in turns: each donor is filled already, or in an earlier turn.

    Args:
        new: slots to fill, with their prefixes; empty prefixes need nothing.
        held: slots that are filled, with the tokens of their keys and values.

    """
    donors_by_start: dict[bytes, list[_Donor]] = {}
    for slot, tokens in held:
        donors_by_start.setdefault(_start(tokens), []).append(_Donor(-1, slot, tokens))
    turns: list[list[Prefill]] = []
    # Longest first: a prefix of another prefix is then copied whole.
    for slot, prefix in sorted(new, key=lambda one: -one[1].size):
        if not prefix.size:
            continue
        donors = donors_by_start.setdefault(_start(prefix), [])
        donor = max(donors, key=lambda one: (_n_common(prefix, one.tokens), -one.turn, one.slot), default=None)
        turn = donor.turn + 1 if donor else 0
        if turn == len(turns):
            turns.append([])
        shared = _n_common(prefix, donor.tokens) if donor else 0
        turns[turn].append(Prefill(slot, donor.slot if donor else -1, shared, prefix.size))
        donors.append(_Donor(turn, slot, prefix))
    return turns


def _start(tokens: Tokens) -> bytes:
    return tokens[:_MIN_SHARED].tobytes()


def _n_common(one: Tokens, other: Tokens) -> int:
    n = min(one.size, other.size)
    unequal = np.flatnonzero(one[:n] != other[:n])
    return int(unequal[0]) if unequal.size else n


# --- Packs emissions into frames for the token log: numbered, bounded in size, in order -------------------------------
# Messages stay queued until the log has them. After an outage of Redis the log gets every token in order: possibly
# twice (the ledger drops the overlap), never with a gap (invariants 2 and 3).


FRAME_BYTES = 1 << 20
"""Maximum size of the columns of one frame, unless one sample's routed experts are larger."""
BATCH_BYTES = 4 << 20
"""Approximate size of one transaction."""
UNSENT_BYTES = 64 << 20
"""With more than this unsent the engine is paused: some minutes of a fast engine without Redis."""

_ROW_BYTES = sum(column.itemsize for column in (U64, U32, U32, U32, U32, U8))
_TOKEN_BYTES = I32.itemsize + F32.itemsize


@dataclass(slots=True)
class _Columns:
    """One frame being filled."""

    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[bytes] = field(default_factory=list)
    top: list[bytes] = field(default_factory=list)
    n_bytes: int = 0

    def add(self, emission: Emission, start: int, end: int, routed: bytes, n_bytes: int) -> None:
        finish = emission.finish if end == len(emission.tokens) else FINISH_NONE
        self.rows.append(
            (emission.sample, emission.attempt, emission.offset + start, end - start, emission.version, finish)
        )
        self.tokens += emission.tokens[start:end]
        self.logprobs += emission.logprobs[start:end]
        self.routed.append(routed)
        self.top.append(emission.top_of(start, end))
        self.n_bytes += n_bytes

    def frame(self, worker: str, seq: int) -> TokenFrame:
        samples, attempts, offsets, counts, versions, finish = zip(*self.rows, strict=True)
        return TokenFrame(
            worker=worker,
            seq=seq,
            samples=pack(samples, U64),
            attempts=pack(attempts, U32),
            offsets=pack(offsets, U32),
            counts=pack(counts, U32),
            versions=pack(versions, U32),
            finish=pack(finish, U8),
            tokens=pack(self.tokens, I32),
            logprobs=pack(self.logprobs, F32),
            routed_experts=b"".join(self.routed),
            routed_bytes=_sizes(self.routed),
            top_logprobs=b"".join(self.top),
            top_bytes=_sizes(self.top),
        )


def _sizes(columns: list[bytes]) -> bytes:
    return pack([len(one) for one in columns], U32) if any(columns) else b""


def frames(
    worker: str, first_seq: int, emissions: Sequence[Emission], max_bytes: int = FRAME_BYTES
) -> Iterator[TokenFrame]:
    """Yield the frames that carry `emissions`: one, unless its columns would be larger than `max_bytes`.

    An emission too long for one frame continues in the next; only its last row carries the finish.
    """
    columns, seq = _Columns(), first_seq
    for emission in emissions:
        if not emission.tokens and emission.finish == FINISH_NONE:
            continue
        token_bytes = _TOKEN_BYTES + len(emission.top_of(0, 1))
        max_tokens = max(1, (max_bytes - _ROW_BYTES) // token_bytes)
        for start in range(0, max(1, len(emission.tokens)), max_tokens):
            end = min(start + max_tokens, len(emission.tokens))
            routed = emission.routed_experts if end == len(emission.tokens) else b""
            n_bytes = _ROW_BYTES + (end - start) * token_bytes + len(routed)
            if columns.rows and columns.n_bytes + n_bytes > max_bytes:
                yield columns.frame(worker, seq)
                columns, seq = _Columns(), seq + 1
            columns.add(emission, start, end, routed, n_bytes)
    if columns.rows:
        yield columns.frame(worker, seq)


class UnsentQueue:
    """The unsent messages of one incarnation for the token log, in order; the manager relays them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._seq = 0
        self._unsent: deque[tuple[Message, int]] = deque()
        self.unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._unsent)

    @property
    def is_full(self) -> bool:
        """Return True if the engine must be paused until some messages have been sent."""
        return self.unsent_bytes > UNSENT_BYTES

    def add(self, emissions: Sequence[Emission]) -> None:
        """Queue emissions: tokens in frames, then failures."""
        for frame in frames(self._worker, self._seq, emissions):
            self._seq = frame.seq + 1
            self._put(
                frame,
                len(frame.tokens)
                + len(frame.logprobs)
                + len(frame.routed_experts)
                + len(frame.top_logprobs)
                + _ROW_BYTES * (len(frame.samples) // U64.itemsize),
            )
        for emission in emissions:
            if emission.error:
                failed = SampleFailed(
                    worker=self._worker, sample=emission.sample, attempt=emission.attempt, reason=emission.error
                )
                self._put(failed, _ROW_BYTES + len(emission.error))

    def batch(self, max_bytes: int = BATCH_BYTES) -> list[Message]:
        """Return the oldest unsent messages of about `max_bytes`, at least one if there is any."""
        chosen: list[Message] = []
        for message, n_bytes in self._unsent:
            max_bytes -= n_bytes
            if chosen and max_bytes < 0:
                break
            chosen.append(message)
        return chosen

    def sent(self, n: int) -> None:
        """Remove the `n` oldest messages: the log has them."""
        for _ in range(n):
            self.unsent_bytes -= self._unsent.popleft()[1]

    def _put(self, message: Message, n_bytes: int) -> None:
        self._unsent.append((message, n_bytes))
        self.unsent_bytes += n_bytes


# --- The requests of an engine that streams the tokens of each one: which are live, and their emissions ---------------


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended."""

    request: Request
    tokens: list[int]
    """All completion tokens, those of earlier attempts included."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the last tokens of `tokens`, which were not taken yet."""
    top_logprobs: bytearray = field(default_factory=bytearray)
    """Of these tokens: see `Emission`."""
    is_started: bool = False
    """True once the engine has been given the request."""
    images: object = None
    """Those of its prompt, as the engine has prepared them; a text says why there are none. It does not start before it
    has those that it names."""


class StreamedRequests:
    """The requests of one engine. Not thread-safe.

    Args:
        slots: maximum number of requests that the engine runs at a time, in order of submission.
        max_len: maximum length of prompt and completion together.
        vocabulary: token ids are 0..vocabulary-1.
        shape: shape of the routed experts that the engine returns; None if it returns none.
        logprobs_error: returns why the engine cannot report the log-probabilities of the whole distribution.
        options: those that the engine supports.

    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        vocabulary: int,
        shape: RoutedShape | None = None,
        logprobs_error: Callable[[Sampling], str] = lambda _: "",
        options: Collection[str] = (),
    ) -> None:
        self.vocabulary = vocabulary
        self.version = -1
        self.job_versions: dict[str, int] = {}
        """Job -> version of its adapter, of an engine that holds several; other requests have `version`."""
        self.generated_total = 0
        self._slots = slots
        self._max_len = max_len
        self._shape = shape
        self._logprobs_error = logprobs_error
        self._options = options
        self._live: dict[RequestKey, LiveRequest] = {}
        self._emissions: list[Emission] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests.

        Raises:
            Conflict: a request with the same key is live; none was taken.

        """
        require_new(requests, set(self._live))
        self._live.update((request.key, LiveRequest(request, list(request.tokens))) for request in requests)

    def start(self) -> list[LiveRequest]:
        """Return all requests to generate, in order of submission; end those with nothing to generate."""
        for live in [live for live in self._live.values() if not live.is_started and not self._awaits_images(live)]:
            live.is_started = True
            error = validation_error(live.request, self._max_len, self.vocabulary, self._shape, self._options)
            if not error and live.request.sampling.whole_logprobs:
                error = self._logprobs_error(live.request.sampling)
            if not error and isinstance(live.images, str):
                error = live.images
            if error or (finish := finish_at_start(live.request)):
                self._end(live, finish=FINISH_NONE if error else finish, error=error)
        return [live for live in self._live.values() if live.is_started]

    def awaiting_images(self, key: RequestKey) -> LiveRequest | None:
        """Return a request that waits for its images; None if it has ended, or waits for none."""
        live = self._live.get(key)
        return live if live is not None and self._awaits_images(live) else None

    def _awaits_images(self, live: LiveRequest) -> bool:
        return live.images is None and bool(live.request.sampling.images) and "images" in self._options

    @property
    def can_generate(self) -> bool:
        """False while each request waits for its images."""
        return not all(map(self._awaits_images, self._live.values()))

    def extend(
        self, live: LiveRequest, tokens: Sequence[int], logprobs: Sequence[float], top_logprobs: bytes = b""
    ) -> None:
        """Append generated tokens; a request with a log-probability that is not a number ends with an error."""
        if not self.is_live(live):
            return
        if not all(map(math.isfinite, logprobs)):
            self._end(live, error=NOT_A_NUMBER)
            return
        live.tokens += tokens
        live.logprobs += logprobs
        live.top_logprobs += top_logprobs
        self.generated_total += len(tokens)

    def end(
        self, live: LiveRequest, *, finish: int = FINISH_NONE, error: str = "", routed_experts: bytes = b""
    ) -> None:
        """End a request with FINISH_* or an error; ignored if it has ended."""
        if self.is_live(live):
            self._end(live, finish=finish, error=error, routed_experts=routed_experts)

    def is_live(self, live: LiveRequest) -> bool:
        """Return True if the request has not ended."""
        return self._live.get(live.request.key) is live

    def abort(self, keys: Iterable[RequestKey]) -> list[LiveRequest]:
        """Remove requests and return them; their tokens can still be taken."""
        removed = [live for key in keys if (live := self._live.pop(key, None)) is not None]
        for live in removed:
            self._emit(live)
        return removed

    def release(self, keys: Iterable[RequestKey]) -> list[LiveRequest]:
        """Remove requests and return them; the last emission of each has FINISH_RELEASED."""
        removed = [live for key in keys if (live := self._live.get(key)) is not None]
        for live in removed:
            self._end(live, finish=FINISH_RELEASED)
        return removed

    def begin_version(self, version: int, job_id: str = "") -> None:
        """Mark tokens from now on as generated by `version`: those of one job, or all."""
        self._emit_all(job_id)
        if job_id:
            self.job_versions[job_id] = version
        else:
            self.version = version
            self.job_versions.clear()

    def take_emissions(self) -> list[Emission]:
        """Return everything since the last call."""
        self._emit_all()
        emissions, self._emissions = self._emissions, []
        return emissions

    @property
    def running(self) -> set[RequestKey]:
        """The started requests that have a slot."""
        return set(islice((key for key, live in self._live.items() if live.is_started), self._slots))

    @property
    def n_running(self) -> int:
        """Number of started requests that have a slot."""
        return min(self._slots, sum(live.is_started for live in self._live.values()))

    @property
    def n_pending(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._live) - self.n_running

    def _end(
        self, live: LiveRequest, *, finish: int = FINISH_NONE, error: str = "", routed_experts: bytes = b""
    ) -> None:
        del self._live[live.request.key]
        self._emit(live, finish=finish, error=error, routed_experts=routed_experts)

    def _emit_all(self, job_id: str = "") -> None:
        """Emit the new tokens of one job, or all."""
        for live in self._live.values():
            if not job_id or live.request.job_id == job_id:
                self._emit(live)

    def _emit(
        self, live: LiveRequest, *, finish: int = FINISH_NONE, error: str = "", routed_experts: bytes = b""
    ) -> None:
        if live.logprobs or finish != FINISH_NONE or error:
            offset = len(live.tokens) - len(live.logprobs)
            emission = Emission(
                sample=live.request.sample,
                attempt=live.request.attempt,
                offset=offset,
                tokens=live.tokens[offset:],
                logprobs=live.logprobs,
                version=max(self.job_versions.get(live.request.job_id, self.version), 0),
                finish=finish,
                error=error,
                routed_experts=routed_experts,
                top_logprobs=bytes(live.top_logprobs),
                is_forced=bool(live.request.sampling.forced),
            )
            self._emissions.append(emission)
            live.logprobs, live.top_logprobs = [], bytearray()
