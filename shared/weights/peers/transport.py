"""A blob from a peer over HTTP, with an error for everything that a peer can do wrong.

Where peers are is read from Redis, so none gets the token: each request carries a proof that opens that one blob.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from shared.errors import Corrupt
from shared.proof import prove
from shared.weights.download import Download

BUSY_STATUS = 503
_CONNECT_S = 2.0
_STALL_S = 5.0
"""Longest time without a byte."""
_FAIR_S = 3.0
"""How long a transfer may take before its speed is looked at."""
_SLOW = 1 / 8
"""Slower than this part of the usual speed is slow."""
_SPEEDS_KEPT = 32


class PeerFailed(Exception):
    """The peer did not answer, or broke off."""


class PeerAway(PeerFailed):
    """Nobody answers there, or somebody who is no peer."""


class PeerLacks(PeerFailed):
    """The peer does not have the blob."""


class PeerBusy(PeerFailed):
    """The peer serves as many as it can."""


class PeerSlow(PeerFailed):
    """The peer is much slower than the others are."""


class PeerLied(PeerFailed):
    """What came cannot be the blob."""


class PeerTransport:
    """Connections to peers."""

    def __init__(self, token: str) -> None:
        """Prepare; nothing is dialled yet."""
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS_KEPT)
        """Bytes/s of the last transfers that came through."""

    async def close(self) -> None:
        """Release connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def fetch(self, url: str, download: Download) -> None:
        """Fetch a whole blob, unverified.

        Raises:
            PeerFailed: or one of its kinds; `download` has what came.

        """
        began = time.monotonic()
        try:
            await download.resume(lambda digest, _: self._opened(url, digest, began, download))
        except Corrupt as error:
            raise PeerLied(str(error)) from error
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise PeerAway(str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(str(error) or type(error).__name__) from error
        self._speeds.append(download.n_bytes / max(time.monotonic() - began, 1e-6))

    @asynccontextmanager
    async def _opened(
        self, url: str, digest: str, began: float, download: Download
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        headers = {"Authorization": f"Bearer {prove(self._token, 'chunk', digest)}"}
        async with self._http.get(f"{url}/v1/chunks/{digest}", headers=headers, allow_redirects=False) as response:
            if response.status == 404:
                raise PeerLacks(digest)
            if response.status == BUSY_STATUS:
                raise PeerBusy(digest)
            if response.status == 401:
                raise PeerAway("it refuses the proof of the token: it has another token, or another version of rlboost")
            if response.status != 200:
                raise PeerAway(f"status {response.status}")
            yield 0, self._watched(response.content.iter_any(), began, download)

    async def _watched(self, blocks: AsyncIterator[bytes], began: float, download: Download) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(_STALL_S):
                block = await anext(blocks, None)
            if block is None:
                return
            yield block
            took = time.monotonic() - began
            if took > _FAIR_S and download.n_bytes < took * self._fair_speed():
                raise PeerSlow(f"{download.n_bytes / took:.0f} bytes/s")

    def _fair_speed(self) -> float:
        return _SLOW * statistics.median(self._speeds) if self._speeds else 0.0

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_STALL_S),
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=1 << 20,
            )
        return self._session
