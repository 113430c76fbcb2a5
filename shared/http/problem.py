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
