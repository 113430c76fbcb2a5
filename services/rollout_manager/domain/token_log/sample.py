"""One sample in flight: its tokens, who generated them, and where it failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.services.rollout_manager.domain.token_log.frame_decoder import TOKEN_BYTES
from rlboost.shared.messages import FINISH_NONE, GroupRequested

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
    routed_experts: bytes = b""
    """The column of `shared.wire.routed_experts` of the whole completion, once it has ended."""
    attempt_worker: str = ""
    """The worker of the current attempt, whose tokens count even after it lost the sample; empty if it has none."""

    @property
    def n_tokens(self) -> int:
        """Return how many completion tokens the ledger holds."""
        return len(self.tokens) // TOKEN_BYTES

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
            self.span_starts = [span for span in self.span_starts if span[2] < n_tokens]
            self.finish, self.routed_experts = FINISH_NONE, b""
        return max(0, gone)
