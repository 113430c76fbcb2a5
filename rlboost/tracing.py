"""Traces of samples in OpenTelemetry's format, from the token log."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.ids import SampleId, is_served
from rlboost.shared.messages import (
    ENDED,
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
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Bus, Entry, ReadSize, position
from rlboost.shared.wire import U32, U64, ints

log = structlog.get_logger(__name__)

# --- Traces of samples, from the streams' messages and the times of their entries: a fold without I/O -----------------
# A trace begins when the manager accepts the sample's request, and ends when weights that were trained on it are
# committed; for an evaluation when it has its reward, for a client's request and a later turn of a conversation when it
# is delivered, for a dropped sample when it is dropped. The end of a job ends all its traces. A scored conversation
# has a trace of its own, whole in its `sample_scored`.


MAX_SAMPLES = 200_000
"""Samples that are followed at once; beyond it the oldest are dropped."""
_MAX_VERSIONS = 64
"""The newest versions of a job whose commits are remembered; a sample needs one of the newest two or three."""
_MAX_UNASSIGNED = 64
"""The newest events of a worker that are remembered."""
_COMPLETE = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}
_ENDS = {**_COMPLETE, FINISH_RELEASED: "migrated"}
_CALLED = re.compile(r'\{"name": "([^"]+)"')
"""The tool's name in a published call, whose text may be cut."""
_FAILED = "failed"
_ERRORS = ("lost", "invalid", _FAILED)
"""Ends of an attempt that are errors: the worker was lost, sent invalid tokens, or its engine failed."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a trace, with its child spans. Times are Unix seconds."""

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
    """When its last tokens so far arrived."""
    n_tokens: int
    """Tokens of the completion, including the last of this attempt so far."""
    end: str = ""
    """Why it ended, if its worker said so."""


@dataclass(slots=True)
class _Sample:
    job_id: str
    id: SampleId
    ends_at_delivery: bool
    """No `sample_scored` names it: a client's request, a session's turn, or a later one of another conversation."""
    requested_at: float
    session: int = 0
    """The agent's session that it is a turn of; 0 for none."""
    attempts: list[_Attempt] = field(default_factory=list)
    closed_at: float | None = None
    scored_at: float | None = None
    reward: float | None = None
    score_error: str = ""

    @property
    def is_generated(self) -> bool:
        """Return True if its completion is whole. The manager drops a sample that it closes without that."""
        return bool(self.attempts) and self.attempts[-1].end in _COMPLETE.values()

    @property
    def is_served(self) -> bool:
        """Return True if it is of a client's request, which may have all it needs before the completion ends."""
        return is_served(self.id.pack())


class SampleTraces:
    """The samples whose traces are not complete."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}
        self._by_name: dict[str, int] = {}
        self._committed_at: dict[str, dict[int, float]] = {}
        """Job that has not ended -> weight version -> when it was committed; the last is the newest."""
        self._unassigned: dict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=_MAX_UNASSIGNED))
        """Worker -> when and why the manager took all its samples from it."""

    @property
    def jobs(self) -> frozenset[str]:
        """Return the jobs with a sample that have not ended."""
        return frozenset(self._committed_at)

    def take(self, message: Message, at: float, job_id: str = "") -> list[Span]:
        """Apply a message; return the traces that it completes.

        Args:
            message: the next one of all streams, in the order of their times.
            at: the time of its entry, in Unix seconds.
            job_id: the job whose stream has it; empty if it is of a stream of all jobs.

        Raises:
            KeyError: an event lacks a field.
            ValueError: columns differ in length, or have a part of a number.

        """
        match message:
            case Admitted():
                self._admit(message, at)
            case Placed():
                self._place(message, at)
            case TokenFrame():
                self._extend(message, at)
            case SampleFailed():
                if attempt := self._attempt(message.sample, message.attempt, message.worker):
                    attempt.ended_at, attempt.end = at, f"{_FAILED}: {message.reason}"
            case Closed():
                return self._close(message, at)
            case Event():
                return self._take_event(message.kind, message.fields, at, job_id)
            case WeightsCommitted():
                return self._commit(message, at)
        return []

    def remaining(self) -> list[Span]:
        """Return the incomplete traces of samples that were delivered, and remove all samples."""
        left = [sample for sample in self._samples.values() if sample.closed_at is not None]
        self._samples, self._by_name = {}, {}
        return [self._span(sample) for sample in left]

    def _take_event(self, kind: str, fields: Mapping[str, Any], at: float, job_id: str) -> list[Span]:
        if kind == "sample_scored":
            return [*_conversation(fields, job_id), *self._score(fields, at)]
        if kind == "job_state_changed" and fields["state"] in ENDED:
            return self._end_job(job_id, at)
        if kind == "samples_unassigned":
            self._unassigned[fields["worker"]].append((at, fields["cause"]))
        return []

    def _admit(self, message: Admitted, at: float) -> None:
        request = message.request
        self._committed_at.setdefault(request.job_id, {})
        for sample_id in range(request.group, request.group + request.n):
            if sample_id not in self._samples:
                # The trainer prefers a worker for later turns only: the one that has the conversation in its cache.
                ends = is_served(sample_id) or bool(request.preferred_worker or request.session)
                sample = _Sample(request.job_id, SampleId.unpack(sample_id), ends, at, request.session)
                self._samples[sample_id] = sample
                self._by_name[str(sample.id)] = sample_id
        while len(self._samples) > MAX_SAMPLES:
            self._remove(next(iter(self._samples)))

    def _place(self, message: Placed, at: float) -> None:
        if not message.worker:  # the samples of a job that cannot be read, which have no owner
            return
        columns = zip(ints(message.samples, U64), ints(message.attempts, U32), ints(message.offsets, U32), strict=True)
        for sample_id, number, offset in columns:
            sample = self._samples.get(sample_id)
            if sample and (not sample.attempts or number > sample.attempts[-1].number):
                sample.attempts.append(_Attempt(message.worker, number, offset, at, at, offset))

    def _extend(self, frame: TokenFrame, at: float) -> None:
        for sample_id, number, offset, count, _version, finish in token_rows(frame):
            if attempt := self._attempt(sample_id, number, frame.worker):
                attempt.ended_at, attempt.n_tokens = at, offset + count
                attempt.end = _ENDS.get(finish, attempt.end)

    def _close(self, message: Closed, at: float) -> list[Span]:
        closed = [sample_id for sample_id in ints(message.samples, U64) if sample_id in self._samples]
        for sample_id in closed:
            self._samples[sample_id].closed_at = at
        return self._completed(closed)

    def _score(self, fields: Mapping[str, Any], at: float) -> list[Span]:
        sample_id = self._by_name.get(fields["sample"])
        if sample_id is None:
            return []
        sample = self._samples[sample_id]
        sample.scored_at, sample.reward = at, fields["reward"]
        if sample.reward is None:
            sample.score_error = fields.get("reason") or "no reward"
        return self._completed([sample_id])

    def _commit(self, message: WeightsCommitted, at: float) -> list[Span]:
        versions = self._committed_at.get(message.job_id)
        if versions is None or message.version <= next(reversed(versions), 0):
            return []
        versions[message.version] = at
        if len(versions) > _MAX_VERSIONS:
            del versions[next(iter(versions))]
        return self._completed(self._of_job(message.job_id))

    def _end_job(self, job_id: str, at: float) -> list[Span]:
        ended = self._of_job(job_id)
        for sample in (self._samples[sample_id] for sample_id in ended):
            sample.closed_at = at if sample.closed_at is None else sample.closed_at
        spans = [self._span(self._samples[sample_id]) for sample_id in ended]
        for sample_id in ended:
            self._remove(sample_id)
        self._committed_at.pop(job_id, None)
        if not self._committed_at:
            self._unassigned.clear()
        return spans

    def _of_job(self, job_id: str) -> list[int]:
        return [sample_id for sample_id, sample in self._samples.items() if sample.job_id == job_id]

    def _attempt(self, sample_id: int, number: int, worker: str) -> _Attempt | None:
        """Return an attempt if it is the sample's current one."""
        sample = self._samples.get(sample_id)
        current = sample.attempts[-1] if sample and sample.attempts else None
        return current if current and (current.number, current.worker) == (number, worker) else None

    def _completed(self, candidates: Iterable[int]) -> list[Span]:
        found = [(sample_id, self._samples[sample_id]) for sample_id in candidates]
        done = [(sample_id, sample) for sample_id, sample in found if self._is_complete(sample)]
        spans = [self._span(sample) for _, sample in done]
        for sample_id, _ in done:
            self._remove(sample_id)
        return spans

    def _is_complete(self, sample: _Sample) -> bool:
        if sample.closed_at is None:
            return False
        if sample.ends_at_delivery or not sample.is_generated:
            return True
        newest = next(reversed(self._committed_at[sample.job_id]), 0)
        if sample.scored_at is None:
            return newest > sample.id.step + 1  # its group was dropped
        return sample.id.is_eval or sample.reward is None or newest > sample.id.step

    def _remove(self, sample_id: int) -> None:
        del self._by_name[str(self._samples.pop(sample_id).id)]

    def _span(self, sample: _Sample) -> Span:
        children = tuple(self._child_spans(sample))
        last = sample.attempts[-1] if sample.attempts else None
        attributes: dict[str, str | int | float] = {
            "rlboost.job": sample.job_id,
            "rlboost.sample": str(sample.id),
            "rlboost.step": sample.id.step,
            "rlboost.attempts": len(sample.attempts),
            "rlboost.tokens": last.n_tokens if last else 0,
        }
        if sample.session:
            attributes["rlboost.session"] = str(SampleId.unpack(sample.session))
        if sample.reward is not None:
            attributes["rlboost.reward"] = sample.reward
        if not sample.is_generated and not sample.is_served:
            attributes["rlboost.dropped"] = True
        ends = [child.end for child in children] or [sample.closed_at or sample.requested_at]
        return Span("sample", sample.requested_at, max(ends), attributes, children=children)

    def _child_spans(self, sample: _Sample) -> Iterator[Span]:
        at = sample.requested_at
        for attempt in sample.attempts:
            yield Span("queue", at, attempt.began_at)
            is_last = attempt is sample.attempts[-1]
            end = attempt.end or self._cause_of_end(attempt, default="closed" if is_last else "unassigned")
            attributes: dict[str, str | int | float] = {
                "rlboost.worker": attempt.worker,
                "rlboost.attempt": attempt.number,
                "rlboost.first_token": attempt.offset,
                "rlboost.tokens": attempt.n_tokens - attempt.offset,
                "rlboost.end": end,
            }
            yield Span(
                "generate", attempt.began_at, attempt.ended_at, attributes, end if end.startswith(_ERRORS) else ""
            )
            at = attempt.ended_at
        is_trained = sample.reward is not None and not sample.id.is_eval
        versions = self._committed_at.get(sample.job_id, {})
        for name, end_at, error in (
            ("deliver", sample.closed_at if sample.is_generated else None, ""),
            ("score", sample.scored_at, sample.score_error),
            ("train", versions.get(sample.id.step + 1) if is_trained else None, ""),
        ):
            if end_at is not None and end_at >= at:
                yield Span(name, at, end_at, error=error)
                at = end_at

    def _cause_of_end(self, attempt: _Attempt, default: str) -> str:
        """Return why the manager took all samples from the worker of an attempt, the first time after it began."""
        return next(
            (cause for at, cause in self._unassigned.get(attempt.worker, ()) if at >= attempt.began_at), default
        )


def _conversation(fields: Mapping[str, Any], job_id: str) -> Iterator[Span]:
    """Yield the trace of a scored conversation: what of its time was the model's, and what was not."""
    turns = [message for message in fields.get("messages", ()) if message.get("time")]
    if not turns:
        return
    began, until, called = fields["began_at"], 0.0, ""
    children: list[Span] = []
    for turn in sorted(turns, key=lambda turn: turn["time"]):
        start, end = turn["time"]
        if start > until:
            children.append(_outside(began + until, began + start, called))
        made = {
            "rlboost.tokens": sum(n for _, _, n in turn["spans"]),
            "rlboost.workers": ", ".join(dict.fromkeys(worker for worker, _, _ in turn["spans"])),
            "rlboost.versions": ", ".join(dict.fromkeys(str(version) for _, version, _ in turn["spans"])),
        }
        called = ", ".join(found[1] for call in turn["tool_calls"] if (found := _CALLED.match(call)))
        children.append(Span("turn", began + start, began + end, made | ({"rlboost.tools": called} if called else {})))
        until = max(until, end)
    if fields["duration_s"] > until:
        children.append(_outside(began + until, began + fields["duration_s"], called))
    attributes = {
        "rlboost.job": job_id,
        "rlboost.sample": fields["sample"],
        "rlboost.step": fields["step"],
        "rlboost.turns": len(turns),
        "rlboost.outside_s": fields["outside_s"],
    }
    if fields["reward"] is not None:
        attributes["rlboost.reward"] = fields["reward"]
    error = "" if fields["reward"] is not None else fields["reason"] or "no reward"
    yield Span("conversation", began, max(child.end for child in children), attributes, error, tuple(children))


def _outside(start: float, end: float, called: str) -> Span:
    return Span("outside", start, end, {"rlboost.tools": called} if called else {})


# --- Sends traces to an OpenTelemetry collector over OTLP/HTTP. `OTEL_*` in the environment configure it --------------


_BATCH = 512
_NS = 1_000_000_000


class OtlpTraces:
    """Sends traces in batches of spans; what the collector does not take is dropped."""

    def __init__(self, stop: asyncio.Event) -> None:
        """Connect with the first batch. After the stop, nothing is sent to a collector that did not answer before."""
        self._stop = stop
        self._is_failing = False
        """The last batch was not taken."""
        self._ended = _Ended()
        resource = Resource.create({"service.name": "rlboost"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(self._ended)
        self._exporter = OTLPSpanExporter()

    def send(self, traces: Sequence[Span]) -> int:
        """Send traces; return how many spans were dropped.

        A batch may take as long as `OTEL_EXPORTER_OTLP_TIMEOUT`, 10 s by default. After one that fails, the others of
        this call are dropped without being tried.
        """
        tracer = self._provider.get_tracer("rlboost")
        for trace in traces:
            _emit(tracer, trace, Context())
        spans, self._ended.spans = self._ended.spans, []
        for at in range(0, len(spans), _BATCH):
            if self._is_failing and self._stop.is_set():
                return len(spans) - at
            self._is_failing = self._exporter.export(spans[at : at + _BATCH]) is not SpanExportResult.SUCCESS
            if self._is_failing:
                return len(spans) - at
        return 0


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _emit(tracer: Tracer, trace: Span, parent: Context) -> None:
    span = tracer.start_span(trace.name, parent, attributes=trace.attributes, start_time=int(trace.start * _NS))
    if trace.error:
        span.set_status(Status(StatusCode.ERROR, trace.error))
    for child in trace.children:
        _emit(tracer, child, set_span_in_context(span, parent))
    span.end(int(trace.end * _NS))


# --- Follows a system's streams, and sends the trace of each sample. No service waits for it --------------------------
# It writes nothing to Redis but a dead letter for an entry that it cannot decode, as every reader does.
#
# Consumes: the token log, committed weights, and the events and scored samples of each job that has not ended.
# Produces: traces. Waits for: the next entries, the collector. Ends when: the stop is set; then it sends what is left.


_BLOCK_S = 0.5
_RETRY_S = 1.0
_MAX_ENTRIES = 2048
"""Maximum number of entries that one read returns of all streams together."""


async def follow(bus: Bus, send: Callable[[Sequence[Span]], int], stop: asyncio.Event) -> None:
    """Follow until the stop.

    Args:
        bus: has the streams.
        send: sends traces, in a thread of its own, and returns how many spans were dropped.
        stop: ends it.

    """
    samples, streams = SampleTraces(), _Streams(bus)
    while not stop.is_set():
        try:
            entries = await streams.read()
        except BusUnavailable as error:
            log.warning("redis_unavailable", error=str(error), during="reading samples")
            await until_stop(stop, _RETRY_S)
            continue
        complete: list[Span] = []
        for entry in entries:
            try:
                complete += samples.take(entry.message, position(entry.id)[0] / 1e3, streams.job_of(entry.stream))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("entry_skipped", stream=entry.stream, entry=entry.id, error=repr(error))
        streams.keep(samples.jobs)
        await _send(send, complete)
    await _send(send, samples.remaining())


async def _send(send: Callable[[Sequence[Span]], int], complete: Sequence[Span]) -> None:
    if complete and (dropped := await asyncio.to_thread(send, complete)):
        log.warning("spans_dropped", spans=dropped, reason="the collector did not take them")


class _Streams:
    """The streams of the system and of its jobs, read as one in the order of their entries' times."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._size = ReadSize(_MAX_ENTRIES)
        self._cursors = {names.TOKEN_LOG: START, names.WEIGHTS_COMMITTED: START}
        self._jobs: dict[str, str] = {}
        """Stream of a job -> the job."""
        self._begun: set[str] = set()
        """Jobs whose first request `read` has returned."""

    def job_of(self, stream: str) -> str:
        """Return the job of a stream; empty for a stream of all jobs."""
        return self._jobs.get(stream, "")

    def keep(self, jobs: Collection[str]) -> None:
        """Read no more streams of jobs that have begun and are not one of these."""
        ended = self._begun.difference(jobs)
        for stream in [stream for stream, job_id in self._jobs.items() if job_id in ended]:
            del self._jobs[stream], self._cursors[stream]
        self._begun -= ended

    async def read(self) -> list[Entry]:
        """Return the next entries; none if none came in time, or if the streams of another job are to be read first."""
        count = max(1, self._size.count // len(self._cursors))
        found = await self._bus.read(self._cursors, count=count, block_s=_BLOCK_S)
        self._size.update(found)
        if unknown := _jobs_of(found).difference(self._jobs.values()):
            for job_id in unknown:
                self._jobs |= dict.fromkeys((names.job_events(job_id), names.job_samples(job_id)), job_id)
            self._cursors |= {stream: START for stream in self._jobs if stream not in self._cursors}
            return []
        by_stream: dict[str, list[Entry]] = {}
        for entry in found:
            by_stream.setdefault(entry.stream, []).append(entry)
        # A stream may have more entries than were read: those of other streams wait that are later than what was read.
        more = [position(entries[-1].id) for entries in by_stream.values() if len(entries) >= count]
        entries = sorted(found, key=lambda entry: position(entry.id))
        if more:
            entries = [entry for entry in entries if position(entry.id) <= min(more)]
        for entry in entries:
            self._cursors[entry.stream] = entry.id
        self._begun |= _jobs_of(entries)
        return entries


def _jobs_of(entries: Sequence[Entry]) -> set[str]:
    return {entry.message.request.job_id for entry in entries if isinstance(entry.message, Admitted)}
