"""Watches the leading manager through a TCP connection, which the kernel closes when the leader's process dies."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import structlog

_CONNECT_LIMIT_S = 1.0
_RECONNECT_PAUSE_S = 0.05

log = structlog.get_logger(__name__)


class LeaderConnection:
    """A connection to one manager at a time. It carries nothing, in particular no token."""

    def __init__(self) -> None:
        """Start without a connection; the first request opens one."""
        self._url = ""
        """The last manager to which a connection was open."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def has_died(self, url: str, limit_s: float) -> bool:
        """Return True as soon as a process that listened at the URL has died; False after the limit.

        Only a connection that was open before counts: an address that always refuses may be behind a firewall. A leader
        that closed it and still listens, for example through a proxy, lives. The machine's death closes nothing.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + limit_s
        if url != self._url:
            await self._connect(url)
        while url == self._url and (left_s := limit - loop.time()) > 0:
            if self._reader is not None and not await _ends(self._reader, left_s):
                return False
            if await self._connect(url):
                return True
            await asyncio.sleep(_RECONNECT_PAUSE_S)  # a dying process may still listen
        await asyncio.sleep(limit - loop.time())
        return False

    async def _connect(self, url: str) -> bool:
        """Connect if possible; return True if the address refuses connections."""
        await self.close()
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                self._reader, self._writer = await asyncio.open_connection(parts.hostname or "", port)
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):  # an unreachable network, a timeout or an invalid URL prove nothing
            return False
        self._url = url
        log.info("leader_watched", url=url)
        return False

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


async def _ends(reader: asyncio.StreamReader, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            return not await reader.read(1)
    except TimeoutError:
        return False
    except OSError:
        return True
