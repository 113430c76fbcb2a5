"""Sends traces to an OpenTelemetry collector over OTLP/HTTP. `OTEL_*` in the environment configure it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from rlboost.tracing.samples import Span

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
