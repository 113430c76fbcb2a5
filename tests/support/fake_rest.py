"""The REST API without a network: a table of answers behind httpx's own transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx

Answer = httpx.Response | BaseException
PROBLEM = {"content-type": "application/problem+json"}


class FakeRest(httpx.MockTransport):
    """Answers each route with its scripted answers in turn, the last of them for ever."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self._answers: dict[str, list[Answer]] = {}
        self.requests: list[httpx.Request] = []

    def on(self, route: str, *answers: Answer) -> None:
        """Script a route, such as `GET /v1/jobs`."""
        self._answers[route] = list(answers)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answers = self._answers.get(f"{request.method} {request.url.path}")
        if answers is None:
            return problem(404, "Not Found", f"{request.method} {request.url.path} is not scripted")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def sent(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


def ok(body: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body)


def problem(status: int, title: str, detail: str) -> httpx.Response:
    return httpx.Response(status, headers=PROBLEM, json={"title": title, "status": status, "detail": detail})


def lines(text: Sequence[str], then: Exception | None = None) -> httpx.Response:
    """Return a stream of lines that then ends, or breaks off with an error."""

    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for line in text:
                yield f"{line}\n".encode()
            if then is not None:
                raise then

    return httpx.Response(200, stream=Stream())


def job(state: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a job's record as the API shows it."""
    empty: dict[str, Any] = {
        "created_at": "2026-01-01T00:00:00+00:00",
        "started_at": None,
        "finished_at": None,
        "latest": {},
    }
    return {"id": "j-1", "name": "j", "state": state, "step": step, "steps": 3, "waiting": None, "error": None} | {
        **empty,
        **fields,
    }
