"""Clients that are silent cannot close a server to others."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from rlboost.shared.http import connections, server
from rlboost.shared.http.guard import Guard
from tests.support.eventually import eventually
from tests.support.ports import reserved_port

HEAD = b"GET /slow HTTP/1.1\r\nHost: x\r\n"


async def _serve(monkeypatch: pytest.MonkeyPatch, places: int) -> AsyncIterator[int]:
    monkeypatch.setattr(connections, "HEAD_LIMIT_S", 0.5)
    monkeypatch.setattr(connections, "_SWEEP_S", 0.05)
    monkeypatch.setattr(server, "max_connections", lambda _: places)
    app = server.create_app("site", guard=Guard.of_token("t"), not_ready_reason=lambda: None)

    @app.get("/slow")
    async def slow(_: Request) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for _ in range(4):
                await asyncio.sleep(0.3)
                yield "."

        return StreamingResponse(body())

    sock = server.bind("127.0.0.1", 0)
    stop = asyncio.Event()
    serving = asyncio.create_task(server.server_loop(app, sock)(stop), name="site")
    yield sock.getsockname()[1]
    stop.set()
    await serving


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    async with contextlib.asynccontextmanager(_serve)(monkeypatch, 64) as port:
        yield port


@pytest.fixture
async def small_port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    async with contextlib.asynccontextmanager(_serve)(monkeypatch, 8) as port:
        yield port


@pytest.fixture
async def impatient_port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    async with contextlib.asynccontextmanager(_serve)(monkeypatch, 8) as port:
        yield port


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends before it closes the connection."""
    try:
        async with asyncio.timeout(30.0):
            return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"\r\n", HEAD, b"POST /slow HTTP/1.1\r\nX: "])
async def test_connection_without_a_whole_request_is_closed(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await closed(reader) == b""
    writer.close()


async def test_response_that_takes_long_is_not_cut(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
        for _ in range(2):
            assert (await client.get("/slow")).text == "...."


async def test_connection_is_kept_while_the_client_pauses_between_requests(port: int) -> None:
    """The pause is longer than a client may take for the headers of a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30.0):
            await reader.readuntil(b'{"status":"ok"}')
        closing = asyncio.create_task(reader.read(1), name="closing")
        assert not (await asyncio.wait({closing}, timeout=3 * connections.HEAD_LIMIT_S))[0]
        closing.cancel()
        await asyncio.wait({closing})
    writer.write(HEAD)
    assert await closed(reader) == b""
    writer.close()


async def test_idle_connection_is_closed_in_the_end(impatient_port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient_port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await closed(reader)).endswith(b'{"status":"ok"}')
    writer.close()


async def test_headers_without_end_are_not_held_in_memory(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD)
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            writer.write(b"X: " + b"y" * 65_536 + b"\r\n")
            await writer.drain()
        pytest.fail("the server read 64 MiB of headers")
    await closed(reader)
    writer.close()


_SERVE = """
import sys
from fastapi import FastAPI
from rlboost.shared.http import connections, server
connections.HEAD_LIMIT_S = 0.5
app = FastAPI()
app.get("/health")(lambda: {})
server.serve(app, "127.0.0.1", int(sys.argv[1]))
"""


async def test_server_of_a_command_closes_silent_connections_and_ends_at_a_signal() -> None:
    """As `rlboost gateway` and `rlboost tinker` serve."""
    with reserved_port() as port:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVE, str(port))
        try:

            async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", port)
                return None

            found = await eventually(opened)
            assert found is not None
            reader, writer = found
            assert await closed(reader) == b""
            writer.close()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
                assert (await client.get("/health")).status_code == 200
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 30.0) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def test_trailers_without_end_are_not_held_in_memory(port: int) -> None:
    """What follows a chunked body: a server that adds it to the headers needs twenty bytes for each that is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chunked = b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    writer.write(chunked + b"a: b\r\n" * 100 + b"\r\n")
    assert b" 405 " in await reader.readuntil(b"\r\n")
    writer.write(chunked)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            writer.write(b"a: b\r\n" * 10_000)
            await writer.drain()
        pytest.fail("the server read 6 MB of trailers")
    await closed(reader)
    writer.close()


async def test_request_is_answered_among_more_idle_connections_than_there_are_places(small_port: int) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", small_port) for _ in range(50)]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{small_port}", timeout=30.0) as client:
        assert (await client.get("/healthz")).status_code == 200
    for _, writer in idle:
        writer.close()
