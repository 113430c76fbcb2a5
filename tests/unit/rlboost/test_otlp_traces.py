"""Traces are sent in batches, and a collector that does not answer delays neither the others nor the stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

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
