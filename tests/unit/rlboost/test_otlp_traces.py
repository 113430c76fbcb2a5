"""Traces are sent in batches, and a collector that does not answer delays neither the others nor the stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rlboost import tracing
from rlboost.tracing import OtlpTraces, Span

TRACES = [Span("sample", 1.0, 2.0, children=(Span("queue", 1.0, 2.0),))] * 600
"""1,200 spans: three batches."""


class Exporter:
    """A collector that fails from a batch on."""

    def __init__(self, n_good: int) -> None:
        self.n_good = n_good
        self.batches: list[Sequence[ReadableSpan]] = []

    def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(batch)
        return SpanExportResult.SUCCESS if len(self.batches) <= self.n_good else SpanExportResult.FAILURE


def sender(monkeypatch: pytest.MonkeyPatch, n_good: int) -> tuple[OtlpTraces, Exporter, asyncio.Event]:
    exporter, stop = Exporter(n_good), asyncio.Event()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda: exporter)
    return OtlpTraces(stop), exporter, stop


def test_all_batches_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, exporter, stop = sender(monkeypatch, 4)
    assert traces.send(TRACES) == 0
    stop.set()
    assert traces.send(TRACES[:1]) == 0, "what is left at the stop"
    assert [len(batch) for batch in exporter.batches] == [512, 512, 176, 2]


def test_batches_after_a_failed_one_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, exporter, stop = sender(monkeypatch, 1)
    assert traces.send(TRACES) == 1200 - 512
    assert traces.send(TRACES) == 1200
    assert len(exporter.batches) == 3, "the next call tries again"
    stop.set()
    assert traces.send(TRACES) == 1200
    assert len(exporter.batches) == 3


@pytest.mark.parametrize(("given", "named"), [({}, "rlboost"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_service_name_is_that_of_the_environment(
    given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    traces, exporter, _ = sender(monkeypatch, 1)
    traces.send(TRACES[:1])
    assert exporter.batches[0][0].resource.attributes["service.name"] == named


def test_conversation_is_one_trace_whose_turns_are_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda: exporter)
    turns = (Span("turn", 1.0, 1.5, {"rlboost.tools": "add"}), Span("outside", 1.5, 2.0), Span("turn", 2.0, 2.25))
    trace = Span("conversation", 1.0, 2.25, {"rlboost.turns": 2}, "no reward", turns)
    assert OtlpTraces(asyncio.Event()).send([trace]) == 0
    root = next(span for span in exporter.get_finished_spans() if span.parent is None)
    assert root.context is not None
    assert (root.name, root.status.status_code, root.status.description) == (
        "conversation",
        StatusCode.ERROR,
        "no reward",
    )
    below = [span for span in exporter.get_finished_spans() if span.parent is not None]
    assert {span.parent and span.parent.span_id for span in below} == {root.context.span_id}
    assert {span.context and span.context.trace_id for span in below} == {root.context.trace_id}
    times = [(span.name, span.start_time, span.end_time) for span in below]
    seconds = [("turn", 1.0, 1.5), ("outside", 1.5, 2.0), ("turn", 2.0, 2.25)]
    assert times == [(name, int(start * 1e9), int(end * 1e9)) for name, start, end in seconds]
