"""Sends traces to an OpenTelemetry collector over OTLP/HTTP. `OTEL_*` in the environment configure it."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from rlboost.tracing.samples import Span

_BATCH = 512
_NS = 1_000_000_000


class OtlpTraces:
    """Sends each batch at once; a batch that the collector does not take is dropped."""

    def __init__(self) -> None:
        """Connect with the first batch."""
        self._ended = _Ended()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "rlboost"}))
        self._provider.add_span_processor(self._ended)
        self._exporter = OTLPSpanExporter()

    def send(self, traces: Sequence[Span]) -> int:
        """Send traces; return how many spans were dropped. It may take as long as `OTEL_EXPORTER_OTLP_TIMEOUT`."""
        tracer = self._provider.get_tracer("rlboost")
        for trace in traces:
            _emit(tracer, trace, Context())
        spans, self._ended.spans = self._ended.spans, []
        batches = [spans[at : at + _BATCH] for at in range(0, len(spans), _BATCH)]
        return sum(len(batch) for batch in batches if self._exporter.export(batch) is not SpanExportResult.SUCCESS)


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _emit(tracer: Tracer, span: Span, parent: Context) -> None:
    made = tracer.start_span(span.name, parent, attributes=span.attributes, start_time=int(span.start * _NS))
    if span.error:
        made.set_status(Status(StatusCode.ERROR, span.error))
    for child in span.children:
        _emit(tracer, child, set_span_in_context(made, parent))
    made.end(int(span.end * _NS))
