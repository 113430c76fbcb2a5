"""`rlboost trace` on a real system, with a worker that is killed, against an OTLP receiver in this process."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.black_box import RLBOOST, ROOT, BlackBox, black_box
from tests.support.small_job import samples_of, small_job


class Receiver:
    """A collector: the spans that it has received."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                receiver.spans += [
                    span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans
                ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="otlp-receiver")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def roots(self) -> list[Span]:
        return [span for span in list(self.spans) if not span.parent_span_id]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes}


def kill_generating(box: BlackBox) -> bool:
    """Kill a preemptible worker that has samples; return False if there is none."""
    for worker in box.get("/v1/workers"):
        if worker["role"] == "preemptible" and worker["state"] == "ready" and worker["running"]:
            os.kill(worker["pid"], signal.SIGKILL)
            return True
    return False


@pytest.mark.timeout(900)
@pytest.mark.long
def test_traces_show_the_loss_of_a_worker_and_the_step_of_each_sample(tmp_path: Path, receiver: Receiver) -> None:
    spec = small_job(steps=6)
    with black_box(tmp_path / "state", workers=2) as box:
        log = (tmp_path / "trace.log").open("wb")
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        command = [*RLBOOST, "trace", "--state", str(box.state)]
        tracer = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            box.until(lambda: "sending traces" in (tmp_path / "trace.log").read_text(), "traces are sent")
            with box.begun_on_spot(spec, 2) as (job, _):
                box.until_step(job, 1)
                box.until(lambda: kill_generating(box), "a preemptible worker generates", every_s=0.01)
                box.until_completed(job)
            box.until(lambda: len(receiver.roots()) >= samples_of(spec), "all samples are traced")
            tracer.send_signal(signal.SIGTERM)
            assert tracer.wait(60) == 0, (tmp_path / "trace.log").read_text()
        finally:
            tracer.kill()
            tracer.wait()
            log.close()
        events = box.events(job)
    roots = {span.trace_id: attributes(span) for span in receiver.roots()}
    assert len(roots) == len({root["rlboost.sample"] for root in roots.values()}) == samples_of(spec)
    assert {root["rlboost.job"] for root in roots.values()} == {job}
    parts: dict[bytes, list[Span]] = {trace: [] for trace in roots}
    for span in receiver.spans:
        if span.parent_span_id:
            parts[span.trace_id].append(span)
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    for trace, root in roots.items():
        names = [part.name for part in parts[trace]]
        attempts = [part for part in parts[trace] if part.name == "generate"]
        assert len(attempts) == root["rlboost.attempts"] >= 1
        assert sum(attributes(part)["rlboost.end"] == "lost" for part in attempts) == sum(
            part.status.code == Status.STATUS_CODE_ERROR for part in attempts
        )
        assert names[-1] == ("score" if "/e" in root["rlboost.sample"] else "train")
    n_lost = sum(span.status.code == Status.STATUS_CODE_ERROR for span in receiver.spans)
    unassigned = [event["fields"] for event in events if event["kind"] == "samples_unassigned"]
    assert n_lost == sum(fields["samples"] for fields in unassigned if fields["cause"] == "lost") > 0
