"""From what the engine has made to what the token log gets: frames, numbered, bounded in size, in order.

Nothing leaves the outbox before the log has it, so a broker that was away finds every token in order: sent twice
perhaps (the ledger cuts an overlap), never with a gap (invariants 2 and 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.columns import F32, I32, U8, U32, U64, pack
from shared.messages import FINISH_NONE, Message, SampleFailed, TokenFrame

FRAME_BYTES = 1 << 20
"""Size of the columns of one frame at most."""
BATCH_BYTES = 4 << 20
"""How much is sent in one transaction, about."""
UNSENT_BYTES = 64 << 20
"""With more than this unsent the engine has to stand still: some minutes of a fast engine without a broker."""

_ROW_BYTES = sum(column.itemsize for column in (U64, U32, U32, U32, U32, U8))
_TOKEN_BYTES = I32.itemsize + F32.itemsize


class Made(Protocol):
    """What an engine hands out about one sample (`ports.Emission`): tokens of one weight version, from `offset` on."""

    @property
    def sample(self) -> int: ...  # noqa: D102 - the fields are described at ports.Emission
    @property
    def attempt(self) -> int: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> list[int]: ...  # noqa: D102
    @property
    def logprobs(self) -> list[float]: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def finish(self) -> int: ...  # noqa: D102
    @property
    def error(self) -> str: ...  # noqa: D102


@dataclass(slots=True)
class _Columns:
    """One frame being filled."""

    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    n_bytes: int = 0

    def add(self, made: Made, start: int, end: int) -> None:
        finish = made.finish if end == len(made.tokens) else FINISH_NONE
        self.rows.append((made.sample, made.attempt, made.offset + start, end - start, made.version, finish))
        self.tokens += made.tokens[start:end]
        self.logprobs += made.logprobs[start:end]
        self.n_bytes += _ROW_BYTES + (end - start) * _TOKEN_BYTES

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
        )


def frames(worker: str, first_seq: int, made: Sequence[Made], max_bytes: int = FRAME_BYTES) -> Iterator[TokenFrame]:
    """Yield the frames that carry `made`: one, unless its columns would be larger than `max_bytes`.

    A row too long for one frame goes on in the next, and only its last part carries the finish.
    """
    longest = max(1, (max_bytes - _ROW_BYTES) // _TOKEN_BYTES)
    columns, seq = _Columns(), first_seq
    for item in made:
        if not item.tokens and item.finish == FINISH_NONE:
            continue
        for start in range(0, max(1, len(item.tokens)), longest):
            end = min(start + longest, len(item.tokens))
            if columns.rows and columns.n_bytes + _ROW_BYTES + (end - start) * _TOKEN_BYTES > max_bytes:
                yield columns.frame(worker, seq)
                columns, seq = _Columns(), seq + 1
            columns.add(item, start, end)
    if columns.rows:
        yield columns.frame(worker, seq)


class Outbox:
    """What one incarnation owes the token log, in order."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._seq = 0
        self._unsent: deque[tuple[Message, int]] = deque()
        self.unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._unsent)

    @property
    def full(self) -> bool:
        """Tell whether the engine must stand still until the log has taken some."""
        return self.unsent_bytes > UNSENT_BYTES

    def add(self, made: Sequence[Made]) -> None:
        """Take what the engine has handed out: tokens in frames, then what failed."""
        for frame in frames(self._worker, self._seq, made):
            self._seq = frame.seq + 1
            self._put(
                frame, len(frame.tokens) + len(frame.logprobs) + _ROW_BYTES * (len(frame.samples) // U64.itemsize)
            )
        for item in made:
            if item.error:
                failed = SampleFailed(worker=self._worker, sample=item.sample, attempt=item.attempt, reason=item.error)
                self._put(failed, _ROW_BYTES + len(item.error))

    def batch(self, max_bytes: int = BATCH_BYTES) -> list[Message]:
        """Return the oldest unsent messages, at least one if there is any, up to about `max_bytes`."""
        chosen: list[Message] = []
        for message, n_bytes in self._unsent:
            max_bytes -= n_bytes
            if chosen and max_bytes < 0:
                break
            chosen.append(message)
        return chosen

    def sent(self, n: int) -> None:
        """Forget the `n` oldest: the log has them."""
        for _ in range(n):
            self.unsent_bytes -= self._unsent.popleft()[1]

    def _put(self, message: Message, n_bytes: int) -> None:
        self._unsent.append((message, n_bytes))
        self.unsent_bytes += n_bytes
