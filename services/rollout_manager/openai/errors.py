"""Errors in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import ErrorFormat

ROUTES = "GET /v1/models, GET /v1/models/{model}, POST /v1/completions and POST /v1/chat/completions"


def openai_problem(
    status: int, title: str, detail: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Return an error that names the request's field `param`; its code is the title in snake case."""
    return Problem(status, title, detail, headers=headers, error=_error(status, title, detail, param))


def error_object(problem: Problem) -> dict[str, Any]:
    """Return the content of an error's `error`."""
    return dict(problem.extra.get("error") or _error(problem.status, problem.title, problem.detail))


def openai_error_format(own_paths: Collection[str]) -> ErrorFormat:
    """Return a function that gives errors this format on all routes below `/v1`, known or not, but RLBoost's own.

    Args:
        own_paths: the first part of the path of each of RLBoost's own routes below `/v1`, such as `jobs`.

    """

    def format_error(method: str, path: str, document: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        version, _, rest = path.strip("/").partition("/")
        if version != "v1" or rest.partition("/")[0] in own_paths:
            return None
        status, title, detail = document["status"], document["title"], document["detail"]
        if status == 401:
            title = "Invalid API key"
        elif "error" not in document and status in {404, 405}:
            title = "Unknown URL"
            detail = f"{method} {path} is not supported: of OpenAI's API, this server has {ROUTES}"
        elif fields := document.get("errors"):
            status, detail = 400, "; ".join(f"{item['field']}: {item['error']}" for item in fields)
        error = document.get("error") or _error(status, title, detail)
        return status, {"error": error}

    return format_error


def _error(status: int, title: str, detail: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": detail, "type": kind, "param": param, "code": title.lower().replace(" ", "_")}
