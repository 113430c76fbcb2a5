"""Probe whether a process is ready."""

from __future__ import annotations

import httpx

from rlboost.local import redis_server
from rlboost.local.processes import HttpReady, RedisReady

_TIMEOUT_S = 2.0


class Readiness:
    """Probes through one HTTP client; close it after use."""

    def __init__(self) -> None:
        """Create the client, which costs more than a probe."""
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)  # a proxy cannot reach loopback

    async def not_ready_reason(self, ready: HttpReady | RedisReady | None) -> str | None:
        """Return None if the process is ready, else the reason it is not."""
        if ready is None:
            return None
        if isinstance(ready, RedisReady):
            return await redis_server.not_ready_reason(ready.url)
        try:
            response = await self._http.get(ready.url)
        except httpx.TransportError as error:
            return f"{ready.url} does not answer: {error or type(error).__name__}"
        if response.status_code == httpx.codes.OK:
            return None
        return f"{ready.url} says {response.status_code}: {response.text[:300]}"

    async def close(self) -> None:
        """Close the client."""
        await self._http.aclose()
