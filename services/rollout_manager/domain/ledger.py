"""The token ledger: a fold over the token log (invariants 1 to 4).

The log is one stream in one order. Every record may be applied again without effect, so replaying the log from its
oldest entry gives the same ledger as having lived through it, whatever the manager had already done about it:

- `Admitted` adds a group's samples;
- `Placed` begins an attempt of a sample at `offset` tokens: the new owner has exactly these, so whatever an earlier
  owner flushed beyond them is cut, and frames of earlier attempts no longer count;
- `TokenFrame` extends samples; a row counts only under the current attempt and where it meets the ledger's length;
- `Closed` ends samples that were delivered or dropped;
- `Restated` repeats one sample whole, so that the log may be trimmed behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.columns import F32, I32, U8, U32, U64, ints, length, pack
from shared.errors import Bury
from shared.ids import MAX_GROUP_SIZE, job_of
from shared.messages import FINISH_NONE, GroupRequested, Placed, Restated, SampleFailed, TokenFrame

TOKEN_BYTES = I32.itemsize
FAILURE_LIMIT = 3
"""A sample that failed by itself so often is dropped with the reason; preemptions do not count."""


@dataclass(slots=True)
class Sample:
    """One sample in flight."""

    id: int
    request: GroupRequested
    first_id: str
    """Oldest log entry that a replay needs for it."""
    first_mark: int
    """How many tokens the log had carried when that entry was written."""
    attempt: int = 0
    """The current attempt; 0 before the first placement."""
    worker: str = ""
    """The current owner; empty while it waits."""
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: int = FINISH_NONE
    failures: int = 0

    @property
    def n_tokens(self) -> int:
        """Return how many completion tokens the ledger holds."""
        return len(self.tokens) // TOKEN_BYTES

    def cut(self, n_tokens: int) -> int:
        """Keep the first `n_tokens` and return how many went."""
        gone = self.n_tokens - n_tokens
        if gone > 0:
            del self.tokens[n_tokens * TOKEN_BYTES :], self.logprobs[n_tokens * TOKEN_BYTES :]
            self.spans = _spans_of(self.spans, n_tokens)
            self.finish = FINISH_NONE
        return max(0, gone)


def _spans_of(spans: list[tuple[str, int, int]], n_tokens: int) -> list[tuple[str, int, int]]:
    kept = []
    for worker, version, n in spans:
        take = min(n, n_tokens)
        if take > 0:
            kept.append((worker, version, take))
        n_tokens -= take
    return kept


@dataclass(slots=True)
class Outcome:
    """What one record did, for the audit and for who must act on it."""

    accepted: dict[int, int] = field(default_factory=dict)
    """Job number -> tokens that extended samples."""
    refused: list[tuple[int, str, int]] = field(default_factory=list)
    """(job number, cause, tokens) that were thrown away."""
    duplicates: dict[int, int] = field(default_factory=dict)
    """Job number -> rows that repeated what the ledger had."""
    gaps: list[int] = field(default_factory=list)
    """Samples whose frame began beyond the ledger's end: tokens are missing, so they must be placed anew."""


class Ledger:
    """All samples in flight."""

    def __init__(self) -> None:
        """Start empty."""
        self.samples: dict[int, Sample] = {}
        self.open_in_group: dict[int, int] = {}
        """Group id -> samples of it still in flight."""
        self.finished: dict[int, None] = {}
        """Complete samples that are not closed yet, in order of finishing."""
        self.failed: dict[int, str] = {}
        """Samples whose worker reported a failure of the sample itself, to be placed anew or dropped."""
        self.tokens_in_log = 0
        """Tokens that the log has carried since the fold began."""
        self.tokens_live = 0

    def knows(self, request: GroupRequested) -> bool:
        """Tell whether any sample of the group is in flight."""
        return any(request.group + i in self.samples for i in range(request.n))

    def admit(self, request: GroupRequested, entry_id: str) -> list[Sample]:
        """Add the group's samples that are not there yet and return them.

        Raises:
            Bury: the request's group id or size is not one.

        """
        if request.group % MAX_GROUP_SIZE or not 1 <= request.n <= MAX_GROUP_SIZE or not request.prompt:
            raise Bury(f"group {request.group} of {request.n}: not a group's id and size, or an empty prompt")
        added = []
        for i in range(request.n):
            sample_id = request.group + i
            if sample_id in self.samples:
                continue
            sample = Sample(sample_id, request, entry_id, self.tokens_in_log)
            self.samples[sample_id] = sample
            self.open_in_group[request.group] = self.open_in_group.get(request.group, 0) + 1
            added.append(sample)
        return added

    def place(self, message: Placed) -> list[tuple[Sample, int]]:
        """Begin attempts; return each sample whose attempt rose, with the number of tokens that were cut.

        Raises:
            Bury: the columns do not fit each other.

        """
        rows = list(_rows(message.samples, message.attempts, message.offsets))
        placed = []
        for sample_id, attempt, offset in rows:
            sample = self.samples.get(sample_id)
            if sample is None or attempt <= sample.attempt:
                continue
            cut = sample.cut(offset)
            self.tokens_live -= cut
            sample.attempt, sample.worker = attempt, message.worker
            if sample.finish == FINISH_NONE:
                self.finished.pop(sample_id, None)
            self.failed.pop(sample_id, None)
            placed.append((sample, cut))
        return placed

    def extend(self, frame: TokenFrame) -> Outcome:
        """Apply a worker's tokens.

        Raises:
            Bury: the columns do not fit each other.

        """
        samples, attempts = ints(frame.samples, U64), ints(frame.attempts, U32)
        offsets, counts = ints(frame.offsets, U32), ints(frame.counts, U32)
        versions, finish = ints(frame.versions, U32), ints(frame.finish, U8)
        n_tokens = sum(counts)
        if (
            len({len(samples), len(attempts), len(offsets), len(counts), len(versions), len(finish)}) != 1
            or length(frame.tokens, I32) != n_tokens
            or length(frame.logprobs, F32) != n_tokens
        ):
            raise Bury(f"frame {frame.seq} of {frame.worker}: its columns do not fit each other")
        out = Outcome()
        self.tokens_in_log += n_tokens
        start = 0
        for sample_id, attempt, offset, count, version, ended in zip(
            samples, attempts, offsets, counts, versions, finish, strict=True
        ):
            end = start + count * TOKEN_BYTES
            sample = self.samples.get(sample_id)
            if sample is None or attempt != sample.attempt:
                out.refused.append((job_of(sample_id), "sample_over" if sample is None else "late", count))
            elif offset > sample.n_tokens:
                out.refused.append((job_of(sample_id), "gap", count))
                out.gaps.append(sample_id)
            else:
                known = count if sample.finish else min(count, sample.n_tokens - offset)
                if known:
                    _add(out.duplicates, job_of(sample_id), 1)
                if known < count:
                    self._extend(sample, frame, start + known * TOKEN_BYTES, end, version)
                    _add(out.accepted, job_of(sample_id), count - known)
                if ended and not sample.finish:
                    sample.finish = ended
                    self.finished[sample_id] = None
            start = end
        return out

    def _extend(self, sample: Sample, frame: TokenFrame, start: int, end: int, version: int) -> None:
        sample.tokens += frame.tokens[start:end]
        sample.logprobs += frame.logprobs[start:end]
        added = (end - start) // TOKEN_BYTES
        self.tokens_live += added
        spans = sample.spans
        if spans and spans[-1][:2] == (frame.worker, version):
            spans[-1] = (frame.worker, version, spans[-1][2] + added)
        else:
            spans.append((frame.worker, version, added))

    def fail(self, message: SampleFailed) -> bool:
        """Note that a sample failed by itself; tell whether the message counts."""
        sample = self.samples.get(message.sample)
        if sample is None or sample.attempt != message.attempt or message.sample in self.failed or sample.finish:
            return False
        sample.failures += 1
        self.failed[message.sample] = message.reason
        return True

    def close(self, column: bytes) -> list[Sample]:
        """End samples; return those that were in flight."""
        closed = []
        for sample_id in ints(column, U64):
            sample = self.samples.pop(sample_id, None)
            if sample is None:
                continue
            self.finished.pop(sample_id, None)
            self.failed.pop(sample_id, None)
            self.tokens_live -= sample.n_tokens
            group = sample.request.group
            self.open_in_group[group] -= 1
            if not self.open_in_group[group]:
                del self.open_in_group[group]
            closed.append(sample)
        return closed

    def restate(self, message: Restated, entry_id: str) -> None:
        """Take a restated sample as the log's new beginning for it, or as the sample itself in a trimmed log."""
        mark = self.tokens_in_log
        self.tokens_in_log += length(message.tokens)
        sample = self.samples.get(message.sample)
        if sample is None:
            sample = Sample(
                message.sample,
                message.request,
                entry_id,
                mark,
                message.attempt,
                message.worker,
                bytearray(message.tokens),
                bytearray(message.logprobs),
                list(message.spans),
                failures=message.failures,
            )
            self.samples[message.sample] = sample
            group = message.request.group
            self.open_in_group[group] = self.open_in_group.get(group, 0) + 1
            self.tokens_live += sample.n_tokens
        elif sample.attempt == message.attempt and len(sample.tokens) == len(message.tokens):
            # A frame or a placement between the decision to restate and the entry itself makes the entry
            # insufficient: then the older entries stay needed, and it is restated another time.
            sample.first_id, sample.first_mark = entry_id, mark

    def restated(self, sample: Sample) -> Restated:
        """Return the record that restates a sample."""
        return Restated(
            request=sample.request,
            sample=sample.id,
            attempt=sample.attempt,
            worker=sample.worker,
            tokens=bytes(sample.tokens),
            logprobs=bytes(sample.logprobs),
            spans=list(sample.spans),
            failures=sample.failures,
        )

    def oldest(self) -> Sample | None:
        """Return the sample whose history reaches back farthest."""
        return min(self.samples.values(), key=lambda sample: sample.first_mark, default=None)


def closing(samples: list[Sample]) -> bytes:
    """Return the column of `Closed.samples`."""
    return pack([sample.id for sample in samples], U64)


def _rows(samples: bytes, attempts: bytes, offsets: bytes) -> zip[tuple[int, int, int]]:
    columns = ints(samples, U64), ints(attempts, U32), ints(offsets, U32)
    if len({len(column) for column in columns}) != 1:
        raise Bury("a placement's columns do not fit each other")
    return zip(*columns, strict=True)


def _add(counter: dict[int, int], key: int, n: int) -> None:
    counter[key] = counter.get(key, 0) + n
