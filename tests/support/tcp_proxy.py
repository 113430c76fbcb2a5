"""A TCP proxy that counts what passes and breaks connections where a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ssl import SSLContext
from types import TracebackType
from typing import Self

_BLOCK_BYTES = 64 * 1024


class TcpProxy:
    """Passes connections on to `127.0.0.1:target_port`. Use with `async with`."""

    def __init__(self, target_port: int, tls: SSLContext | None = None) -> None:
        """Nothing listens before the context is entered. With `tls`, clients connect with TLS, which ends here."""
        self._target_port = target_port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.bytes_down = 0
        """Bytes that have gone to clients, headers included."""
        self.break_after: int | None = None
        """Once so many bytes have gone down, every connection breaks, once."""
        self.on_break: Callable[[], None] = lambda: None
        self._away = False

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def go_away(self) -> None:
        """Break every connection, and take none until `come_back`."""
        self._away = True
        for task in self._connections:
            task.cancel()

    def come_back(self) -> None:
        """Take connections again."""
        self._away = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not self._away:
                await self._join(reader, writer)
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            return
        up = asyncio.create_task(self._pass(reader, up_writer, down=False), name="proxy-up")
        down = asyncio.create_task(self._pass(up_reader, writer, down=True), name="proxy-down")
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before anything that may be cancelled: nothing closes it later.
            up_writer.transport.abort()
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
            if down:
                self.bytes_down += len(block)
                if self.break_after is not None and self.bytes_down >= self.break_after:
                    self.break_after = None
                    self.on_break()
                    return
