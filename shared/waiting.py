"""Every wait has a name, a reason, a since and a limit, and can be asked for while it lasts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict

from shared.errors import Timeout


class Waiting(BaseModel):
    """One wait: for what, because of what, since when (Unix seconds), for how long at most."""

    model_config = ConfigDict(frozen=True)

    for_: str
    because: str
    since: float
    limit_s: float

    def public(self) -> dict[str, Any]:
        """Return the form of the REST API."""
        return {"for": self.for_, "because": self.because, "since": self.since, "limit_s": self.limit_s}


class Waits:
    """The waits under way in one process."""

    def __init__(self) -> None:
        """Start with none."""
        self._active: dict[int, Waiting] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def on(self, for_: str, *, because: str, limit_s: float) -> AsyncIterator[None]:
        """Name the wait in the body and end it at its limit.

        Raises:
            Timeout: the body was not done after `limit_s` seconds.

        """
        number = next(self._numbers)
        self._active[number] = Waiting(for_=for_, because=because, since=time.time(), limit_s=limit_s)
        try:
            async with asyncio.timeout(limit_s) as timer:
                yield
        except TimeoutError as error:
            if timer.expired():
                raise Timeout(f"waited {limit_s:.0f} s for {for_} ({because})") from error
            raise
        finally:
            del self._active[number]

    def current(self) -> list[Waiting]:
        """Return the waits under way, oldest first."""
        return sorted(self._active.values(), key=lambda wait: wait.since)
