"""A cheap and a dear model on one port, with OpenAI's API: `python -m rlboost.examples.router.models`.

Stand-ins for real ones, in the standard library: `dear` adds any two numbers, `cheap` only numbers of one digit.
"""

from __future__ import annotations

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

PORT = 8123
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}
"""Of each answer."""


class Models(ThreadingHTTPServer):
    """Answers questions such as `34+5`, and counts them."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        """Listen on a port of this machine; 0: on a free one."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked: Counter[tuple[str, str]] = Counter()
        """Model and question -> number of answers."""
        self.statuses: list[int] = []
        """HTTP statuses of the next answers, before further ones are 200."""
        self._lock = Lock()

    @property
    def url(self) -> str:
        """Return the base of the API."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer to a chat completion's request."""
        model, question = body["model"], body["messages"][-1]["content"]
        with self._lock:
            if self.statuses and (status := self.statuses.pop(0)) != 200:
                return status, {"error": {"message": "try later"}}
            self.asked[model, question] += 1
        one, other = question.split("+")
        text = str(int(one) + int(other)) if model == "dear" or len(one) == len(other) == 1 else "many"
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": USAGE}


class _Handler(BaseHTTPRequestHandler):
    server: Models
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        status, answer = self.server.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        packed = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""


if __name__ == "__main__":
    Models(PORT).serve_forever()
