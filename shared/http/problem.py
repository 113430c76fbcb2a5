"""Error responses: RFC 9457's problem documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROBLEM = "application/problem+json"


class Problem(Exception):
    """An error response: RFC 9457's title, status and detail; the detail says what to do."""

    def __init__(
        self, status: int, title: str, detail: str, *, headers: Mapping[str, str] | None = None, **extra: Any
    ) -> None:
        """Create an error; `extra` adds fields to the document."""
        super().__init__(detail)
        self.headers = headers
        self.status, self.title, self.detail, self.extra = status, title, detail, extra


# --- The error responses of routes, as their OpenAPI documents show them ----------------------------------------------


Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    400: "the request is malformed or incomplete",
    401: "the token is missing or wrong",
    403: "the token does not permit this request",
    404: "there is no such job, worker or other resource",
    409: "the current state forbids it",
    410: "it has ended",
    413: "the body is too large",
    416: "the range starts after the end",
    422: "a value is invalid: see `errors` and `detail`",
    429: "too many requests at once, or with an invalid token",
    503: "not available at present: try again",
    507: "the disk is full, or the store's limit is reached",
}
_PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what failed and what to do"},
    },
    "required": ["type", "title", "status", "detail"],
}


def problems(*statuses: int) -> Responses:
    """Return the documentation of these errors as problem documents (RFC 9457)."""
    return error_responses({PROBLEM: {"schema": _PROBLEM_SCHEMA}}, *statuses)


def error_responses(content: dict[str, Any], *statuses: int) -> Responses:
    """Return the documentation of these errors with another content."""
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def success(media_type: str, description: str = "the content", status: int = 200) -> Responses:
    """Return the documentation of a response that is not JSON."""
    return {status: {"description": description, "content": {media_type: {}}}}


GUARDED_ERRORS = problems(400, 401, 403, 413, 422, 429, 503)
"""The errors of every route that needs the token."""
