"""Traces of samples, from the streams' messages and the times of their entries: a fold without I/O.

A trace begins when the manager accepts the sample's request, and ends when weights that were trained on it are
committed; for an evaluation when it has its reward, for a client's request when it is delivered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlboost.shared.columns import U8, U32, U64, ints
from rlboost.shared.ids import SampleId, is_served
from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_RELEASED,
    FINISH_STOP,
    Admitted,
    Closed,
    Event,
    Message,
    Placed,
    SampleFailed,
    TokenFrame,
    WeightsCommitted,
)

MAX_SAMPLES = 200_000
"""Samples that are followed at once; beyond it the oldest are dropped."""
_ENDS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_RELEASED: "migrated"}
LOST = "lost"
"""The end of an attempt whose worker was lost."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace. Times are Unix seconds."""

    name: str
    start: float
    end: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty if it did not."""
    children: tuple[Span, ...] = ()


@dataclass(slots=True)
class _Attempt:
    worker: str
    number: int
    offset: int
    began_at: float
    ended_at: float
    """Of its last tokens so far."""
    n_tokens: int
    end: str = ""


@dataclass(slots=True)
class _Sample:
    job_id: str
    id: SampleId
    served: bool
    requested_at: float
    attempts: list[_Attempt] = field(default_factory=list)
    delivered_at: float | None = None
    scored_at: float | None = None
    reward: float | None = None


class SampleTraces:
    """Samples that are in flight, or not yet trained on."""

    def __init__(self) -> None:
        """Follow none yet."""
        self._samples: dict[int, _Sample] = {}
        self._by_name: dict[str, int] = {}
        self._committed_at: dict[str, dict[int, float]] = defaultdict(dict)
        """Job -> weight version -> when it was committed."""

    @property
    def jobs(self) -> set[str]:
        """Return the jobs whose samples are followed."""
        return {sample.job_id for sample in self._samples.values()}

    def take(self, message: Message, at: float) -> list[Span]:
        """Apply a message; return the traces that it completes."""
        match message:
            case Admitted():
                self._admit(message, at)
            case Placed():
                self._place(message, at)
            case TokenFrame():
                self._extend(message, at)
            case SampleFailed():
                if attempt := self._attempt(message.sample, message.attempt):
                    attempt.ended_at, attempt.end = at, f"failed: {message.reason}"
            case Closed():
                return self._close(message, at)
            case Event(kind="sample_scored"):
                return self._score(message, at)
            case WeightsCommitted():
                self._committed_at[message.job_id].setdefault(message.version, at)
                return self._completed(
                    [packed for packed, sample in self._samples.items() if sample.job_id == message.job_id]
                )
        return []

    def remaining(self) -> list[Span]:
        """Return the traces of delivered samples that nothing completed yet, and forget all."""
        left = [sample for sample in self._samples.values() if sample.delivered_at is not None]
        self._samples, self._by_name = {}, {}
        return [self._span(sample) for sample in left]

    def _admit(self, message: Admitted, at: float) -> None:
        request = message.request
        for packed in range(request.group, request.group + request.n):
            if packed not in self._samples:
                sample = _Sample(request.job_id, SampleId.unpack(packed), is_served(packed), at)
                self._samples[packed] = sample
                self._by_name[str(sample.id)] = packed
        while len(self._samples) > MAX_SAMPLES:
            self._forget(next(iter(self._samples)))

    def _place(self, message: Placed, at: float) -> None:
        columns = zip(ints(message.samples, U64), ints(message.attempts, U32), ints(message.offsets, U32), strict=True)
        for packed, number, offset in columns:
            if sample := self._samples.get(packed):
                if sample.attempts and not sample.attempts[-1].end:
                    sample.attempts[-1].end = LOST
                sample.attempts.append(_Attempt(message.worker, number, offset, at, at, offset))

    def _extend(self, frame: TokenFrame, at: float) -> None:
        rows = zip(
            ints(frame.samples, U64),
            ints(frame.attempts, U32),
            ints(frame.offsets, U32),
            ints(frame.counts, U32),
            ints(frame.finish, U8),
            strict=True,
        )
        for packed, number, offset, count, finish in rows:
            if attempt := self._attempt(packed, number):
                attempt.ended_at, attempt.n_tokens = at, offset + count
                attempt.end = _ENDS.get(finish, attempt.end)

    def _close(self, message: Closed, at: float) -> list[Span]:
        closed = [packed for packed in ints(message.samples, U64) if packed in self._samples]
        for packed in closed:
            self._samples[packed].delivered_at = at
        return self._completed(closed)

    def _score(self, message: Event, at: float) -> list[Span]:
        packed = self._by_name.get(message.fields["sample"])
        if packed is None:
            return []
        self._samples[packed].scored_at, self._samples[packed].reward = at, message.fields["reward"]
        return self._completed([packed])

    def _attempt(self, packed: int, number: int) -> _Attempt | None:
        """Return an attempt if it is the sample's current one."""
        sample = self._samples.get(packed)
        current = sample.attempts[-1] if sample and sample.attempts else None
        return current if current and current.number == number else None

    def _completed(self, candidates: list[int]) -> list[Span]:
        found = [(packed, self._samples[packed]) for packed in candidates]
        done = [(packed, sample) for packed, sample in found if self._is_complete(sample)]
        for packed, _ in done:
            self._forget(packed)
        return [self._span(sample) for _, sample in done]

    def _is_complete(self, sample: _Sample) -> bool:
        if sample.delivered_at is None or sample.served:
            return sample.delivered_at is not None
        newest = max(self._committed_at[sample.job_id], default=0)
        is_scored = sample.scored_at is not None or newest > sample.id.step + 1  # its group was dropped
        return is_scored and (sample.id.is_eval or newest > sample.id.step)

    def _forget(self, packed: int) -> None:
        del self._by_name[str(self._samples.pop(packed).id)]

    def _span(self, sample: _Sample) -> Span:
        children = tuple(self._parts(sample))
        last = sample.attempts[-1] if sample.attempts else None
        attributes: dict[str, str | int | float] = {
            "rlboost.job": sample.job_id,
            "rlboost.sample": str(sample.id),
            "rlboost.step": sample.id.step,
            "rlboost.attempts": len(sample.attempts),
            "rlboost.tokens": last.n_tokens if last else 0,
        }
        if sample.reward is not None:
            attributes["rlboost.reward"] = sample.reward
        end = max([child.end for child in children], default=sample.requested_at)
        return Span("sample", sample.requested_at, end, attributes, children=children)

    def _parts(self, sample: _Sample) -> Iterator[Span]:
        at = sample.requested_at
        for attempt in sample.attempts:
            yield Span("queue", at, attempt.began_at)
            attributes: dict[str, str | int | float] = {
                "rlboost.worker": attempt.worker,
                "rlboost.attempt": attempt.number,
                "rlboost.first_token": attempt.offset,
                "rlboost.tokens": attempt.n_tokens - attempt.offset,
                "rlboost.end": attempt.end,
            }
            error = attempt.end if attempt.end.startswith((LOST, "failed")) else ""
            yield Span("generate", attempt.began_at, attempt.ended_at, attributes, error)
            at = attempt.ended_at
        for name, end in (
            ("deliver", sample.delivered_at),
            ("score", sample.scored_at),
            ("train", None if sample.id.is_eval else self._committed_at[sample.job_id].get(sample.id.step + 1)),
        ):
            if end is not None and end >= at:
                yield Span(name, at, end)
                at = end
