"""The metrics of a vLLM server that a test plays, served as vLLM serves them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest


class ServingEngine:
    """A server with the gauges and the histogram that workers read, for two replicas, and others that they do not."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        labels = ("model_name", "engine")
        self._running = Gauge("vllm:num_requests_running", "x", labels, registry=self.registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "x", labels, registry=self.registry)
        by_reason = Gauge("vllm:num_requests_waiting_by_reason", "x", (*labels, "reason"), registry=self.registry)
        by_reason.labels("m", "0", "capacity").set(99)
        first_token = Histogram(
            "vllm:time_to_first_token_seconds", "x", labels, buckets=(0.01, 0.1, 1.0), registry=self.registry
        )
        self.first_token = first_token.labels("m", "0")
        first_token.labels("m", "1")
        self.set(running=0)
        self.status = 200
        self.paths = {"/metrics", "/metrics/"}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: list[list[str]] = []
        """The metrics that each request asked for."""

    def set(self, *, running: int, waiting: int = 0) -> None:
        """Set the requests of the second replica; the first has none."""
        for gauge, n in ((self._running, running), (self._waiting, waiting)):
            gauge.labels("m", "0").set(0)
            gauge.labels("m", "1").set(n)

    def page(self, names: list[str]) -> bytes:
        """Return the metrics with these names, all if there are none."""
        registry: Any = self.registry.restricted_registry(names) if names else self.registry
        return generate_latest(registry)


@contextmanager
def serving_engine() -> Iterator[tuple[ServingEngine, str]]:
    """Serve the metrics; yield the engine and its URL."""
    engine = ServingEngine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            names = parse_qs(url.query).get("name[]", [])
            engine.asked.append(names)
            engine.may_answer.wait(10)
            status = engine.status if url.path in engine.paths else 404
            self.send_response(status)
            self.end_headers()
            page = engine.page(names if url.path.endswith("/") else [])
            self.wfile.write(page if status == 200 else b"no")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        engine.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()
