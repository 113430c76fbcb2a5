"""The token ledger: a fold over the token log (invariants 1 to 4).

The log is one ordered stream. Applying a record twice has no effect, so a replay of the log from its oldest entry gives
the same ledger as the live run, whatever the manager had already done:

- `Admitted` adds a group's samples;
- `Placed` begins an attempt of a sample at `offset` tokens: the new owner has exactly these, so tokens that an earlier
  owner flushed after them are cut, and frames of earlier attempts no longer count;
- `TokenFrame` extends samples; a row counts only from the current attempt's worker and where it meets the length;
- `Closed` ends samples that were delivered or dropped;
- `Restated` repeats one whole sample, so that the log before it may be trimmed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

from rlboost.services.rollout_manager.domain.frames import (
    NO_VERSION,
    TOKEN_BYTES,
    ExpectedRows,
    Row,
    Selection,
    limits_of,
)
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import MAX_GROUP_SIZE, is_served, job_of, worker_name
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_RELEASED,
    GroupRequested,
    Placed,
    Restated,
    SampleFailed,
    TokenFrame,
)
from rlboost.shared.wire import F32, I32, TOP, U32, U64, ints, length

# --- sample -----------------------------------------------------------------------------------------------------------
#
# One sample in flight: its tokens, who generated them, and where it failed.


WORKERS_LIMIT = 3
"""A sample that failed on this many different workers is dropped with the reason; preemptions do not count."""
FAILURES_LIMIT = 6
"""A sample that failed this many times is dropped even if there are fewer workers."""
PAST_TOKENS = 16
"""A sample is past the position of its failure after this many more tokens: more than a flush interval may lose."""


@dataclass(slots=True)
class Sample:
    """One sample in flight."""

    id: int
    request: GroupRequested
    first_id: str
    """Oldest log entry that a replay needs for it."""
    log_tokens_before: int
    """Number of tokens in the log before that entry."""
    attempt: int = 0
    """The current attempt; 0 before the first placement."""
    worker: str = ""
    """The current owner; empty while it is queued."""
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    span_starts: list[tuple[str, int, int]] = field(default_factory=list)
    """(worker, weight version, index of the first token) of each span, in order."""
    finish: int = FINISH_NONE
    failed_on: list[str] = field(default_factory=list)
    """Names of the workers on which it failed at about the same position, one for each failure."""
    failed_at: int = 0
    """How many tokens it had at its last failure."""
    offset: int = 0
    """How many tokens it had at the start of this attempt."""
    placed_at: float = 0.0
    """When it was assigned to its owner (manager's clock); 0 if an earlier manager did that."""
    checked: tuple[int, int] = (0, 0)
    """Attempt and number of tokens when its progress was last checked: see `domain.stalls`."""
    patience_s: float = 0.0
    """How long its owner may still hold it without a token."""
    taken_from: str = ""
    """The last worker that held it without a token; another one is preferred."""
    routed_experts: bytes = b""
    """The column of `shared.wire` of the whole completion, once it has ended."""
    attempt_worker: str = ""
    """The worker of the current attempt, whose tokens count even after it lost the sample; empty if it has none."""
    top_logprobs: bytearray = field(default_factory=bytearray)
    """Entries of `shared.wire.TOP`: the request's number of them for each token."""

    @property
    def n_tokens(self) -> int:
        """Return how many completion tokens the ledger holds."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def top_bytes(self) -> int:
        """Return the size of one token's `top_logprobs`."""
        return self.request.sampling.top_logprobs * TOP.itemsize

    @property
    def past_failure(self) -> bool:
        """Return True if it is past the position of its last failure."""
        return self.n_tokens >= self.failed_at + PAST_TOKENS

    def is_over_limit(self, more: int = 0) -> bool:
        """Return True if it must be dropped for its failures, after `more` failures on other workers."""
        workers = len(set(self.failed_on))
        return workers + more >= WORKERS_LIMIT or len(self.failed_on) + more >= FAILURES_LIMIT

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Return (worker, weight version, number of tokens), in order."""
        starts = [start for _, _, start in self.span_starts] + [self.n_tokens]
        return [(worker, version, starts[i + 1] - start) for i, (worker, version, start) in enumerate(self.span_starts)]

    def begin_span(self, worker: str, version: int, start: int) -> None:
        """Start a span at token `start`, unless it continues the last one."""
        if not self.span_starts or self.span_starts[-1][:2] != (worker, version):
            self.span_starts.append((worker, version, start))

    def cut(self, n_tokens: int) -> int:
        """Retain the first `n_tokens` tokens; return how many were cut."""
        gone = self.n_tokens - n_tokens
        if gone > 0:
            del self.tokens[n_tokens * TOKEN_BYTES :], self.logprobs[n_tokens * TOKEN_BYTES :]
            del self.top_logprobs[n_tokens * self.top_bytes :]
            self.span_starts = [span for span in self.span_starts if span[2] < n_tokens]
            self.finish, self.routed_experts = FINISH_NONE, b""
        return max(0, gone)


# --- ledger -----------------------------------------------------------------------------------------------------------


INVALID = (
    "its worker sent a token id outside the vocabulary, a log-probability that is not finite or above 0, more than "
    "max_tokens tokens, a weight version that was not requested, an unknown finish, or routed experts of another shape"
)
"""Reason of the failure of a sample with such tokens, which are not accepted."""
MAX_ATTEMPTS = 1 << 31  # far more than a sample can have
LOG_TOKEN_BYTES = I32.itemsize + F32.itemsize
"""A token of the log: its id and its log-probability."""


@dataclass(slots=True)
class FrameOutcome:
    """What a batch of frames did, for the audit and for the world."""

    accepted: dict[int, int] = field(default_factory=dict)
    """Job number -> tokens that extended samples."""
    grown: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Worker -> tokens that extended samples that it owns; empty: without an owner."""
    refused: list[tuple[int, str, int]] = field(default_factory=list)
    """(job number, cause, tokens) that were discarded."""
    duplicates: dict[int, int] = field(default_factory=dict)
    """Job number -> rows that repeated what the ledger had."""
    gaps: list[int] = field(default_factory=list)
    """Samples whose frame began after the ledger's end: tokens are missing, so they must be placed again."""
    released: list[int] = field(default_factory=list)
    """Samples that their owner has released with all their tokens."""
    invalid: list[int] = field(default_factory=list)
    """Samples that failed because their worker sent rows that no engine sends."""


class Ledger:
    """All samples in flight."""

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self.served: dict[int, Sample] = {}
        """Those of clients."""
        self.open_in_group: dict[int, int] = {}
        """Group id -> samples of it still in flight."""
        self.finished: dict[int, None] = {}
        """Complete samples that are not closed yet, in order of finishing."""
        self.failed: dict[int, str] = {}
        """Samples whose worker reported a failure of the sample itself, to be placed again or dropped."""
        self.tokens_in_log = 0
        """Tokens written to the log since the fold began; other columns count as `LOG_TOKEN_BYTES` per token."""
        self.tokens_live = 0
        self._by_slot: dict[int, Sample] = {}
        self._expected = ExpectedRows()
        self._by_age: dict[int, None] = {}
        """Samples in the order of their oldest log entries, once these are known."""

    def knows(self, request: GroupRequested) -> bool:
        """Return True if any sample of the group is in flight."""
        return any(request.group + i in self.samples for i in range(request.n))

    def is_queued(self, sample_id: int) -> bool:
        """Return True if a sample has no owner and is not complete."""
        sample = self.samples.get(sample_id)
        return sample is not None and not sample.worker and not sample.finish

    def admit(self, request: GroupRequested, entry_id: str) -> list[Sample]:
        """Add the group's samples that are not in flight yet and return them.

        Raises:
            Unprocessable: the request has no valid group id or size, or an empty prompt.

        """
        if request.group % MAX_GROUP_SIZE or not 1 <= request.n <= MAX_GROUP_SIZE or not request.prompt:
            raise Unprocessable(
                f"group {request.group} of {request.n}: invalid group id, invalid size, or empty prompt"
            )
        added = []
        for i in range(request.n):
            sample_id = request.group + i
            if sample_id in self.samples:
                continue
            sample = Sample(sample_id, request, entry_id, self.tokens_in_log)
            self._add(sample)
            added.append(sample)
        return added

    def set_admission_entry(self, request: GroupRequested, entry_id: str) -> None:
        """Set the log entry of an admission, which was decided before it was written."""
        for i in range(request.n):
            sample = self.samples.get(request.group + i)
            if sample is not None and not sample.first_id:
                sample.first_id = entry_id
                self._by_age[sample.id] = None

    def _add(self, sample: Sample) -> None:
        self.samples[sample.id] = sample
        if is_served(sample.id):
            self.served[sample.id] = sample
        self.open_in_group[sample.request.group] = self.open_in_group.get(sample.request.group, 0) + 1
        if sample.first_id:
            self._by_age[sample.id] = None
        slot = self._expect(sample)
        self._expected.limit(slot, limits_of(sample.request))
        self._by_slot[slot] = sample

    def _expect(self, sample: Sample, version: int = NO_VERSION) -> int:
        ended = sample.finish != FINISH_NONE
        attempt = sample.attempt, sample.attempt_worker
        return self._expected.expect(sample.id, *attempt, sample.n_tokens, ended=ended, version=version)

    def place(self, message: Placed) -> list[tuple[Sample, int]]:
        """Begin attempts; return each sample whose attempt rose, with the number of tokens that were cut.

        Raises:
            Unprocessable: the columns differ in length, or an attempt is not below `MAX_ATTEMPTS`.

        """
        rows = list(_placements(message.samples, message.attempts, message.offsets))
        placed = []
        for sample_id, attempt, offset in rows:
            sample = self.samples.get(sample_id)
            if sample is not None and attempt > sample.attempt:
                placed.append((sample, self.begin_attempt(sample, message.worker, attempt, offset)))
        return placed

    def begin_attempt(self, sample: Sample, worker: str, attempt: int, offset: int, placed_at: float = 0.0) -> int:
        """Give a sample with its first `offset` tokens to a worker; return how many tokens were cut."""
        cut = self.cut(sample, offset)
        sample.worker = sample.attempt_worker = worker
        sample.attempt, sample.offset, sample.placed_at = attempt, offset, placed_at
        if sample.finish == FINISH_NONE:
            self.finished.pop(sample.id, None)
        self.failed.pop(sample.id, None)
        self._expect(sample)
        return cut

    def cut(self, sample: Sample, n_tokens: int) -> int:
        """Retain the first `n_tokens` tokens of a sample; return how many were cut."""
        cut = sample.cut(n_tokens)
        self.tokens_live -= cut
        return cut

    def extend(self, *frames: TokenFrame) -> FrameOutcome:
        """Apply workers' tokens: consecutive frames of the log.

        Raises:
            Unprocessable: the columns of a frame differ in length, and nothing was changed; apply frames one by one
                to find which.

        """
        selection = self._expected.select(frames)
        # The log is bounded in tokens, so other columns count as tokens of the same size.
        self.tokens_in_log += sum(len(frame.tokens) for frame in frames) // TOKEN_BYTES
        n_bytes = sum(len(frame.routed_experts) + len(frame.top_logprobs) for frame in frames)
        self.tokens_in_log += n_bytes // LOG_TOKEN_BYTES
        return self._apply(selection)

    def _apply(self, rows: Selection) -> FrameOutcome:
        out = FrameOutcome(accepted=rows.accepted)
        self.tokens_live += sum(rows.accepted.values())
        for sample_id, count in rows.refused:
            cause = "late" if sample_id in self.samples else "sample_over"
            out.refused.append((job_of(sample_id), cause, count))
        for slot, worker, version, start in rows.new_spans:
            self._by_slot[slot].begin_span(worker, version, start)
        tokens, logprobs, grown = rows.tokens, rows.logprobs, out.grown
        for slot, start, end in rows.appends:
            sample = self._by_slot[slot]
            sample.tokens += tokens[start:end]
            sample.logprobs += logprobs[start:end]
            grown[sample.worker] += (end - start) // TOKEN_BYTES
        for slot, finish in rows.ended:
            self._finish(self._by_slot[slot], finish, out)
        for slot, column in rows.routed:
            self._by_slot[slot].routed_experts = column
        for slot, column in rows.top_logprobs:
            self._by_slot[slot].top_logprobs += column
        for row in rows.irregular:
            self._apply_irregular(self._by_slot[row.slot], row, out)
        for slot, worker, count in rows.invalid:
            sample = self._by_slot[slot]
            out.refused.append((job_of(sample.id), "invalid", count))
            failed = SampleFailed(worker=worker, sample=sample.id, attempt=sample.attempt, reason=INVALID)
            if self.fail(failed):
                out.invalid.append(sample.id)
        return out

    def _apply_irregular(self, sample: Sample, row: Row, out: FrameOutcome) -> None:
        """Apply one row of a sample that does not simply continue: skip what is known, refuse what leaves a gap."""
        count, have = len(row.tokens) // TOKEN_BYTES, sample.n_tokens
        job = job_of(sample.id)
        if row.offset > have:
            out.refused.append((job, "gap", count))
            out.gaps.append(sample.id)
            return
        known = count if sample.finish else min(count, have - row.offset)
        if known:
            out.duplicates[job] = out.duplicates.get(job, 0) + 1
        if known < count:
            sample.begin_span(row.worker, row.version, have)
            sample.tokens += row.tokens[known * TOKEN_BYTES :]
            sample.logprobs += row.logprobs[known * TOKEN_BYTES :]
            sample.top_logprobs += row.top_logprobs[known * sample.top_bytes :]
            self.tokens_live += count - known
            out.grown[sample.worker] += count - known
            out.accepted[job] = out.accepted.get(job, 0) + count - known
            self._expect(sample, row.version)
        if row.finish and self._finish(sample, row.finish, out):
            sample.routed_experts = row.routed_experts
            self._expect(sample)

    def _finish(self, sample: Sample, finish: int, out: FrameOutcome) -> bool:
        """Record that a worker has finished a sample; return True if the sample is thereby complete."""
        if finish == FINISH_RELEASED:
            out.released.append(sample.id)
            return False
        if sample.finish:
            return False
        sample.finish = finish
        self.finished[sample.id] = None
        return True

    def fail(self, message: SampleFailed) -> bool:
        """Count a failure of a sample, or one that it may have caused; return True if the message counts."""
        sample = self.samples.get(message.sample)
        if sample is None or not 0 < sample.attempt == message.attempt or message.sample in self.failed:
            return False
        if sample.finish or sample.attempt_worker != message.worker:
            return False
        if sample.past_failure:
            sample.failed_on = []
        sample.failed_on.append(worker_name(message.worker))
        sample.failed_at = sample.n_tokens
        self.failed[message.sample] = message.reason
        return True

    def remove(self, sample_id: int) -> Sample | None:
        """Remove a sample and return it, None if it is not in flight."""
        sample = self.samples.pop(sample_id, None)
        if sample is None:
            return None
        self.served.pop(sample_id, None)
        self.finished.pop(sample_id, None)
        self.failed.pop(sample_id, None)
        self._by_age.pop(sample_id, None)
        del self._by_slot[self._expected.forget(sample_id)]
        self.tokens_live -= sample.n_tokens
        group = sample.request.group
        self.open_in_group[group] -= 1
        if not self.open_in_group[group]:
            del self.open_in_group[group]
        return sample

    def restate(self, message: Restated, entry_id: str) -> None:
        """Make the entry the oldest one that a replay needs for the sample; add the sample if the log was trimmed.

        Raises:
            Unprocessable: its columns differ in length, or it is no sample of its request.

        """
        request = message.request
        if request.group % MAX_GROUP_SIZE or not 0 <= message.sample - request.group < request.n:
            raise Unprocessable(f"sample {message.sample} is not one of the {request.n} of group {request.group}")
        n_tokens, n_logprobs = length(message.tokens), length(message.logprobs)
        spanned = sum(n for _, _, n in message.spans)
        n_top = len(message.top_logprobs)
        if not n_tokens == n_logprobs == spanned or n_top != n_tokens * request.sampling.top_logprobs * TOP.itemsize:
            raise Unprocessable(
                f"sample {message.sample} is restated with {n_tokens} tokens, {n_logprobs} log-probabilities, {n_top} "
                f"bytes of top log-probabilities and spans over {spanned}"
            )
        tokens_before = self.tokens_in_log
        self.tokens_in_log += n_tokens + n_top // LOG_TOKEN_BYTES
        sample = self.samples.get(message.sample)
        if sample is None:
            sample = Sample(
                message.sample,
                message.request,
                entry_id,
                tokens_before,
                message.attempt,
                message.worker,
                bytearray(message.tokens),
                bytearray(message.logprobs),
                failed_on=list(message.failed_on),
                failed_at=message.failed_at,
                attempt_worker=message.attempt_worker or message.worker,
                top_logprobs=bytearray(message.top_logprobs),
            )
            start = 0
            for worker, version, n in message.spans:
                sample.begin_span(worker, version, start)
                start += n
            self._add(sample)
            self.tokens_live += sample.n_tokens
        elif sample.attempt == message.attempt and len(sample.tokens) == len(message.tokens):
            # A frame or a placement between the decision to restate and the entry itself makes the entry
            # insufficient: the older entries stay needed until the sample is restated again.
            sample.first_id, sample.log_tokens_before = entry_id, tokens_before
            self._by_age.pop(sample.id, None)
            self._by_age[sample.id] = None

    def restatement_of(self, sample: Sample) -> Restated:
        """Return the record that restates a sample."""
        return Restated(
            request=sample.request,
            sample=sample.id,
            attempt=sample.attempt,
            worker=sample.worker,
            tokens=bytes(sample.tokens),
            logprobs=bytes(sample.logprobs),
            spans=list(sample.spans),
            failed_on=list(sample.failed_on),
            attempt_worker=sample.attempt_worker,
            failed_at=sample.failed_at,
            top_logprobs=bytes(sample.top_logprobs),
        )

    def oldest_entry(self, read_to: str) -> str:
        """Return the oldest entry of the log that a replay needs, `read_to` if no sample is in flight."""
        return next((self.samples[sample_id].first_id for sample_id in self._by_age), read_to)

    def oldest(self, n: int) -> list[Sample]:
        """Return the `n` samples with the oldest first entries in the log, the oldest first."""
        return [self.samples[sample_id] for sample_id in islice(self._by_age, n)]


def _placements(samples: bytes, attempts: bytes, offsets: bytes) -> zip[tuple[int, int, int]]:
    columns = ints(samples, U64), ints(attempts, U32), ints(offsets, U32)
    if len({len(column) for column in columns}) != 1:
        raise Unprocessable("a placement's columns differ in length")
    if any(attempt >= MAX_ATTEMPTS for attempt in columns[1]):
        raise Unprocessable(f"a placement's attempt is not below {MAX_ATTEMPTS}")
    return zip(*columns, strict=True)
