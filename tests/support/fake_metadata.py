"""The metadata service of a cloud's machine, on loopback: what it answers, how slowly, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

Cloud = Literal["aws", "gcp", "azure"]
MACHINE = "spot_7"
EVENT_ID = "602d9444-d2cd-49c7-8624-8643e7171297"
Answer = tuple[int, bytes, dict[str, str]]
_NOT_FOUND: Answer = (404, b"<html>404 - Not Found</html>", {})


class FakeMetadata:
    """One machine's metadata service.

    Faults are attributes: `slow_s` before each answer, `status` or `garbage` in place of the real one.
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.slow_s = 0.0
        self.status = 0
        self.garbage: bytes | None = None
        self.requests: list[str] = []
        """Method and path of each, in the order of their arrival."""
        self.acknowledged: list[tuple[str, float]] = []
        """Event ids, with Unix seconds."""
        self._gone_at: float | None = None
        self._rebalance: str | None = None
        self._events: list[dict[str, Any]] = []
        self._tokens: set[str] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def preempt(self, lead_s: float, machine: str = MACHINE, kind: str = "Preempt") -> None:
        """Say that the machine (on Azure, that or another one) goes in so many seconds."""
        with self._changed:
            self._gone_at = time.time() + lead_s
            then = format_datetime(datetime.fromtimestamp(self._gone_at, UTC), usegmt=True)
            event: dict[str, Any] = {
                "EventId": EVENT_ID,
                "EventStatus": "Scheduled",
                "EventType": kind,
                "NotBefore": then,
            }
            event |= {"ResourceType": "VirtualMachine", "Resources": [machine], "EventSource": "Platform"}
            self._events.append(event)
            self._changed.notify_all()

    def recommend_rebalance(self) -> None:
        self._rebalance = "2026-03-01T08:22:00Z"

    def expire_tokens(self) -> None:
        self._tokens.clear()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                url = urlsplit(self.path)
                fake.requests.append(f"{self.command} {url.path}")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake._closing.wait(fake.slow_s)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                headers = {key.lower(): value for key, value in self.headers.items()}
                if fake.status or fake.garbage is not None:
                    status, content, more = fake.status or 200, fake.garbage or b"", {}
                else:
                    answer = getattr(fake, f"_{fake.cloud}")
                    status, content, more = answer(self.command, url.path, query, headers, body)
                self.send_response(status)
                for key, value in more.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self._do()

            def do_PUT(self) -> None:
                self._do()

            def do_POST(self) -> None:
                self._do()

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # of a client that did not wait
                    super().handle()

        return Handler

    def _aws(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            if not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return 400, b"", {}
            self._tokens = {f"AQAEA{len(self.requests)}=="}
            return 200, next(iter(self._tokens)).encode(), {}
        if headers.get("x-aws-ec2-metadata-token") not in self._tokens:
            return 401, b"", {}
        if path == "/latest/meta-data/spot/instance-action" and self._gone_at is not None:
            then = datetime.fromtimestamp(self._gone_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return 200, json.dumps({"action": "terminate", "time": then}).encode(), {}
        if path == "/latest/meta-data/events/recommendations/rebalance" and self._rebalance:
            return 200, json.dumps({"noticeTime": self._rebalance}).encode(), {}
        return (200, b"eu-west-1", {}) if path == "/latest/meta-data/placement/region" else _NOT_FOUND

    def _gcp(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        zone = path == "/computeMetadata/v1/instance/zone"
        if method != "GET" or not (zone or path == "/computeMetadata/v1/instance/preempted"):
            return _NOT_FOUND
        if headers.get("metadata-flavor") != "Google":
            return 403, b"Missing Metadata-Flavor:Google header.", {}
        if zone:
            return 200, b"projects/123456/zones/us-central1-a", {"Metadata-Flavor": "Google"}
        with self._changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag", self._etag()) == self._etag():
                # As the real one: without an etag, only a change from now on is waited for.
                self._changed.wait(min(float(query.get("timeout_sec", "60")), 60.0))
            value = b"TRUE" if self._gone_at is not None else b"FALSE"
            return 200, value, {"ETag": self._etag(), "Metadata-Flavor": "Google"}

    def _etag(self) -> str:
        return "aa11" if self._gone_at is None else "bb22"

    def _azure(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        if headers.get("metadata") != "true" or "api-version" not in query:
            return 400, b'{"error": "Bad request"}', {}
        if (method, path) == ("GET", "/metadata/instance/compute"):
            return (
                200,
                json.dumps({"azEnvironment": "AzurePublicCloud", "name": MACHINE, "location": "westeurope"}).encode(),
                {},
            )
        if path != "/metadata/scheduledevents":
            return _NOT_FOUND
        if method == "POST":
            ids = [request["EventId"] for request in json.loads(body)["StartRequests"]]
            if not all(any(event["EventId"] == id_ for event in self._events) for id_ in ids):
                return 400, b"", {}
            self.acknowledged += [(id_, time.time()) for id_ in ids]
            return 200, b"", {}
        return 200, json.dumps({"DocumentIncarnation": len(self._events), "Events": self._events}).encode(), {}
