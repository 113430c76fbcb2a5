"""Fetch a blob from a peer over HTTP, with one error type for each way in which a peer can fail.

The URLs of peers come from Redis, so no peer is sent a credential: each request carries a proof that is valid for one
blob.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rlboost.shared.errors import Corrupt
from rlboost.shared.http.token_signature import sign
from rlboost.shared.weights.download import Download

BUSY_STATUS = 503
_CONNECT_S = 2.0
_STALL_S = 5.0
"""Maximum time without a byte."""
_FAIR_S = 3.0
"""How long a transfer may take before its speed is checked."""
_SLOW = 1 / 8
"""A transfer below this fraction of the median speed is slow."""
_SPEEDS_KEPT = 32


class PeerFailed(Exception):
    """The peer did not answer, or the transfer broke off."""


class PeerUnreachable(PeerFailed):
    """Nothing answers at the URL, or it is not a peer."""


class BlobNotHeld(PeerFailed):
    """The peer does not have the blob."""


class PeerBusy(PeerFailed):
    """The peer serves its maximum of concurrent transfers."""


class PeerSlow(PeerFailed):
    """The peer is much slower than the others."""


class DigestMismatch(PeerFailed):
    """The received bytes do not have the blob's digest or length."""


class PeerTransport:
    """Connections to peers."""

    def __init__(self, peer_key: str) -> None:
        """Connect lazily; see `token_signature.peer_key`."""
        self._peer_key = peer_key
        self._session: aiohttp.ClientSession | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS_KEPT)
        """Bytes/s of the last completed transfers."""

    async def close(self) -> None:
        """Release connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def fetch(self, url: str, download: Download) -> None:
        """Fetch a whole blob; the caller checks its digest.

        Raises:
            PeerFailed: or a subclass; `download` has the bytes received so far.

        """
        began = time.monotonic()
        try:
            await download.resume(lambda digest, _: self._opened(url, digest, began, download))
        except Corrupt as error:
            raise DigestMismatch(str(error)) from error
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise PeerUnreachable(str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(str(error) or type(error).__name__) from error
        self._speeds.append(download.n_bytes / max(time.monotonic() - began, 1e-6))

    @asynccontextmanager
    async def _opened(
        self, url: str, digest: str, began: float, download: Download
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        headers = {"Authorization": f"Bearer {sign(self._peer_key, 'chunk', digest)}"}
        async with self._http.get(f"{url}/v1/chunks/{digest}", headers=headers, allow_redirects=False) as response:
            if response.status == 404:
                raise BlobNotHeld(digest)
            if response.status == BUSY_STATUS:
                raise PeerBusy(digest)
            if response.status == 401:
                raise PeerUnreachable(
                    "it refuses the proof of the peer key: it is of another system, or has another version of rlboost"
                )
            if response.status != 200:
                raise PeerUnreachable(f"status {response.status}")
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
