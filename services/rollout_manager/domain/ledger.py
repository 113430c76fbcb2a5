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

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.rollout_manager.domain.rows import (
    NO_VERSION,
    Expected,
    Ints,
    Rows,
    changes,
    first_of_each,
    rows_of,
    sort_out,
    stretches,
)
from shared.columns import I32, U32, U64, ints, length
from shared.errors import Bury
from shared.ids import JOB_SHIFT, MAX_GROUP_SIZE, job_of
from shared.messages import FINISH_NONE, FINISH_RELEASED, GroupRequested, Placed, Restated, SampleFailed, TokenFrame

TOKEN_BYTES = I32.itemsize
WORKERS_LIMIT = 3
"""A sample that failed on so many different workers is dropped with the reason; preemptions do not count."""
FAILURES_LIMIT = 6
"""Or so often in all, where there are fewer workers."""
PAST_TOKENS = 16
"""So many tokens behind the place where a sample failed, it is past that: more than a flush interval may lose."""


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
    stretches: list[tuple[str, int, int]] = field(default_factory=list)
    """(worker, weight version, index of the first token), in order: who made what follows, up to the next."""
    finish: int = FINISH_NONE
    failed_on: list[str] = field(default_factory=list)
    """Of each time that it failed at about the same place, the name of the worker."""
    failed_at: int = 0
    """How many tokens it had when it failed last."""
    offset: int = 0
    """How many tokens its owner began this attempt with."""
    placed_at: float = 0.0
    """When its owner got it (manager's clock)."""

    @property
    def n_tokens(self) -> int:
        """Return how many completion tokens the ledger holds."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def past_failure(self) -> bool:
        """Tell whether it has got past the place where it failed last."""
        return self.n_tokens >= self.failed_at + PAST_TOKENS

    def is_over_limit(self, more: int = 0) -> bool:
        """Tell whether it is to be dropped for its failures, with so many `more` on other workers."""
        workers = len(set(self.failed_on))
        return workers + more >= WORKERS_LIMIT or len(self.failed_on) + more >= FAILURES_LIMIT

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Return (worker, weight version, number of tokens), in order."""
        starts = [start for _, _, start in self.stretches] + [self.n_tokens]
        return [(worker, version, starts[i + 1] - start) for i, (worker, version, start) in enumerate(self.stretches)]

    def begin_stretch(self, worker: str, version: int, start: int) -> None:
        """Note who makes the tokens from `start` on."""
        if not self.stretches or self.stretches[-1][:2] != (worker, version):
            self.stretches.append((worker, version, start))

    def cut(self, n_tokens: int) -> int:
        """Keep the first `n_tokens` and return how many went."""
        gone = self.n_tokens - n_tokens
        if gone > 0:
            del self.tokens[n_tokens * TOKEN_BYTES :], self.logprobs[n_tokens * TOKEN_BYTES :]
            self.stretches = [stretch for stretch in self.stretches if stretch[2] < n_tokens]
            self.finish = FINISH_NONE
        return max(0, gone)


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
    released: list[int] = field(default_factory=list)
    """Samples that their owner has handed back as it was asked to, with all that it had made."""


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
        self._by_slot: dict[int, Sample] = {}
        self._expected = Expected()
        self._by_age: dict[int, None] = {}
        """Samples in the order of their oldest log entries, once these are known."""

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
            self._add(sample)
            added.append(sample)
        return added

    def recorded(self, request: GroupRequested, entry_id: str) -> None:
        """Note where in the log an admission stands that was decided before it was written."""
        for i in range(request.n):
            sample = self.samples.get(request.group + i)
            if sample is not None and not sample.first_id:
                sample.first_id = entry_id
                self._by_age[sample.id] = None

    def _add(self, sample: Sample) -> None:
        self.samples[sample.id] = sample
        self.open_in_group[sample.request.group] = self.open_in_group.get(sample.request.group, 0) + 1
        if sample.first_id:
            self._by_age[sample.id] = None
        self._by_slot[self._expect(sample)] = sample

    def _expect(self, sample: Sample, version: int = NO_VERSION) -> int:
        ended = sample.finish != FINISH_NONE
        return self._expected.expect(sample.id, sample.attempt, sample.n_tokens, ended=ended, version=version)

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
            sample.attempt, sample.worker, sample.offset = attempt, message.worker, offset
            if sample.finish == FINISH_NONE:
                self.finished.pop(sample_id, None)
            self.failed.pop(sample_id, None)
            self._expect(sample)
            placed.append((sample, cut))
        return placed

    def extend(self, *frames: TokenFrame) -> Outcome:
        """Apply workers' tokens: frames that stand one behind the other in the log.

        Raises:
            Bury: the columns of a frame do not fit each other, and nothing was changed; with several frames, give them
                one by one to know which.

        """
        rows = rows_of(frames)
        slots = self._expected.slots(frames)
        out = Outcome()
        self.tokens_in_log += len(rows.tokens)
        found = sort_out(rows, slots, self._expected)
        for row in found.refused.tolist():
            sample_id = int(rows.samples[row])
            cause = "late" if sample_id in self.samples else "sample_over"
            out.refused.append((job_of(sample_id), cause, int(rows.counts[row])))
        self._extend_regular(rows, found.regular, slots, out)
        for row in found.odd.tolist():
            self._extend_odd(rows, row, self._by_slot[int(slots[row])], out)
        return out

    def _extend_regular(self, rows: Rows, regular: Ints, slots: Ints, out: Outcome) -> None:
        made = regular[rows.counts[regular] > 0]
        slot, counts, versions = slots[made], rows.counts[made], rows.versions[made]
        first = first_of_each(slot)
        for i in changes(first, self._expected.version[slot], versions).tolist():
            row = int(made[i])
            sample = self._by_slot[int(slot[i])]
            sample.begin_stretch(rows.worker(row), int(versions[i]), int(rows.offsets[row]))
        tokens, logprobs = rows.gather(made)
        start = 0
        for key, n in stretches(first, slot, counts):
            sample, end = self._by_slot[key], start + n * TOKEN_BYTES
            sample.tokens += tokens[start:end]
            sample.logprobs += logprobs[start:end]
            start = end
        # Of several rows of one slot, the last is written last.
        self._expected.length[slot] = rows.offsets[made] + counts
        self._expected.version[slot] = versions
        self._accept(rows.samples[made], counts, out)
        for row in np.sort(regular[rows.finish[regular] != FINISH_NONE]).tolist():
            self._end(self._by_slot[int(slots[row])], int(rows.finish[row]), out)

    def _extend_odd(self, rows: Rows, row: int, sample: Sample, out: Outcome) -> None:
        """Apply one row of a sample that is current but does not simply go on."""
        offset, count, have = int(rows.offsets[row]), int(rows.counts[row]), sample.n_tokens
        job = job_of(sample.id)
        if offset > have:
            out.refused.append((job, "gap", count))
            out.gaps.append(sample.id)
            return
        known = count if sample.finish else min(count, have - offset)
        if known:
            out.duplicates[job] = out.duplicates.get(job, 0) + 1
        if known < count:
            version = int(rows.versions[row])
            sample.begin_stretch(rows.worker(row), version, have)
            tokens, logprobs = rows.gather(np.array([row]))
            sample.tokens += tokens[known * TOKEN_BYTES :]
            sample.logprobs += logprobs[known * TOKEN_BYTES :]
            self._expect(sample, version)
            self._accept(rows.samples[row : row + 1], np.array([count - known]), out)
        if rows.finish[row]:
            self._end(sample, int(rows.finish[row]), out)

    def _accept(self, samples: npt.NDArray[np.uint64], counts: Ints, out: Outcome) -> None:
        self.tokens_live += int(counts.sum())
        jobs = samples >> JOB_SHIFT
        while jobs.size:
            job, same = int(jobs[0]), jobs == jobs[0]
            out.accepted[job] = out.accepted.get(job, 0) + int(counts[same].sum())
            jobs, counts = jobs[~same], counts[~same]

    def _end(self, sample: Sample, finish: int, out: Outcome) -> None:
        if finish == FINISH_RELEASED:
            out.released.append(sample.id)
        elif not sample.finish:
            sample.finish = finish
            self._expect(sample)
            self.finished[sample.id] = None

    def fail(self, message: SampleFailed) -> bool:
        """Note that a sample failed, or may have been why its worker did; tell whether the message counts."""
        sample = self.samples.get(message.sample)
        if sample is None or sample.attempt != message.attempt or message.sample in self.failed or sample.finish:
            return False
        if sample.past_failure:
            sample.failed_on = []
        sample.failed_on.append(name_of(message.worker))
        sample.failed_at = sample.n_tokens
        self.failed[message.sample] = message.reason
        return True

    def close(self, sample_ids: Iterable[int]) -> list[Sample]:
        """End samples; return those that were in flight."""
        closed = []
        for sample_id in sample_ids:
            sample = self.samples.pop(sample_id, None)
            if sample is None:
                continue
            self.finished.pop(sample_id, None)
            self.failed.pop(sample_id, None)
            self._by_age.pop(sample_id, None)
            del self._by_slot[self._expected.forget(sample_id)]
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
                failed_on=list(message.failed_on),
                failed_at=length(message.tokens),
            )
            start = 0
            for worker, version, n in message.spans:
                sample.begin_stretch(worker, version, start)
                start += n
            self._add(sample)
            self.tokens_live += sample.n_tokens
        elif sample.attempt == message.attempt and len(sample.tokens) == len(message.tokens):
            # A frame or a placement between the decision to restate and the entry itself makes the entry
            # insufficient: then the older entries stay needed, and it is restated another time.
            sample.first_id, sample.first_mark = entry_id, mark
            self._by_age.pop(sample.id, None)
            self._by_age[sample.id] = None

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
            failures=len(sample.failed_on),
            failed_on=list(sample.failed_on),
        )

    def oldest(self, n: int) -> list[Sample]:
        """Return the `n` samples whose entries reach back farthest in the log, the oldest first."""
        return [self.samples[sample_id] for sample_id in islice(self._by_age, n)]


def name_of(worker_id: str) -> str:
    """Return a worker's name, which all its incarnations share."""
    return worker_id.rpartition("-")[0] or worker_id


def _rows(samples: bytes, attempts: bytes, offsets: bytes) -> zip[tuple[int, int, int]]:
    columns = ints(samples, U64), ints(attempts, U32), ints(offsets, U32)
    if len({len(column) for column in columns}) != 1:
        raise Bury("a placement's columns do not fit each other")
    return zip(*columns, strict=True)
