"""Packs emissions into frames for the token log: numbered, bounded in size, in order.

Messages stay queued until the log has them. After an outage of Redis the log gets every token in order: possibly
twice (the ledger drops the overlap), never with a gap (invariants 2 and 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.shared.messages import FINISH_NONE, Message, SampleFailed, TokenFrame
from rlboost.shared.wire.columns import F32, I32, U8, U32, U64, pack

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
    n_bytes: int = 0

    def add(self, emission: Emission, start: int, end: int, routed: bytes) -> None:
        finish = emission.finish if end == len(emission.tokens) else FINISH_NONE
        self.rows.append(
            (emission.sample, emission.attempt, emission.offset + start, end - start, emission.version, finish)
        )
        self.tokens += emission.tokens[start:end]
        self.logprobs += emission.logprobs[start:end]
        self.routed.append(routed)
        self.n_bytes += _ROW_BYTES + (end - start) * _TOKEN_BYTES + len(routed)

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
            routed_bytes=pack([len(one) for one in self.routed], U32) if any(self.routed) else b"",
        )


def frames(
    worker: str, first_seq: int, emissions: Sequence[Emission], max_bytes: int = FRAME_BYTES
) -> Iterator[TokenFrame]:
    """Yield the frames that carry `emissions`: one, unless its columns would be larger than `max_bytes`.

    An emission too long for one frame continues in the next; only its last row carries the finish.
    """
    max_tokens = max(1, (max_bytes - _ROW_BYTES) // _TOKEN_BYTES)
    columns, seq = _Columns(), first_seq
    for emission in emissions:
        if not emission.tokens and emission.finish == FINISH_NONE:
            continue
        for start in range(0, max(1, len(emission.tokens)), max_tokens):
            end = min(start + max_tokens, len(emission.tokens))
            routed = emission.routed_experts if end == len(emission.tokens) else b""
            n_bytes = _ROW_BYTES + (end - start) * _TOKEN_BYTES + len(routed)
            if columns.rows and columns.n_bytes + n_bytes > max_bytes:
                yield columns.frame(worker, seq)
                columns, seq = _Columns(), seq + 1
            columns.add(emission, start, end, routed)
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
