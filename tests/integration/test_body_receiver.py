"""Uploads to a server that also runs an app, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter

from rlboost.shared.errors import Unprocessable
from rlboost.shared.http import transfer_server
from rlboost.shared.http.server import bind, server_loop
from rlboost.shared.http.transfer_server import BodyReceiver, TransferServer
from rlboost.shared.proxies import direct
from rlboost.shared.weights import transfer
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from rlboost.shared.weights.transfer import BadStatus, BlobTransfer, Buffers, Download, DownloadFailed, TransferTimedOut
from tests.support.eventually import eventually

DATA = os.urandom(3 << 20)
AUTHORIZED = {"Authorization": "Bearer t"}


class Site:
    """A server that receives uploads of at most 4 MiB to `/file`, and an app that answers with what it received."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.by_app: list[bytes] = []
        self.rejects = False
        self.fails = False
        self.uploads = BodyReceiver(
            lambda path, given: (path, given) == ("/file", "Bearer t"), self.store, max_bytes=4 << 20
        )
        sent = Counter("sent", "bytes", registry=CollectorRegistry())
        self.transfers = TransferServer(lambda _: None, sent, uploads=self.uploads)
        self.app = FastAPI()
        self.sock = bind("127.0.0.1", 0)
        self.sock.listen()  # so that a client may connect before the server runs
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"

        @self.app.put("/file")
        async def put(request: Request) -> Response:
            body = await request.body()
            self.by_app.append(body)
            return Response(b"the app received %d" % len(body), 422 if self.rejects else 200)

        @self.app.get("/file")
        async def get() -> Response:
            return Response(b"from the app")

    async def store(self, _: str, body: memoryview) -> None:
        if self.rejects:
            raise Unprocessable("another digest")
        if self.fails:
            raise OSError("input/output error")
        self.stored.append(bytes(body))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site, stop = Site(), asyncio.Event()
    serving = asyncio.create_task(server_loop(site.app, site.sock, transfers=site.transfers)(stop), name="site")
    yield site
    stop.set()
    await serving


@pytest.fixture
async def client() -> AsyncIterator[BlobTransfer]:
    client = BlobTransfer(connect_s=5.0, stall_s=30.0, follow_redirects=True, route=direct)
    yield client
    client.close()


async def test_uploads_go_past_the_app_on_one_connection(site: Site) -> None:
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        for data in (DATA, b"", DATA[:10]):
            assert (await http.put(f"{site.url}/file", content=data)).status_code == 204
        assert len(site.transfers.connections) == 1
        assert (await http.get(f"{site.url}/file")).content == b"from the app"
    assert site.stored == [DATA, b"", DATA[:10]]


async def test_concurrent_uploads_do_not_share_a_buffer(site: Site, client: BlobTransfer) -> None:
    blobs = [os.urandom(1 << 20) for _ in range(40)]
    await asyncio.gather(*(client.upload(f"{site.url}/file", "Bearer t", memoryview(blob)) for blob in blobs))
    # The app has those beyond the limit.
    assert sorted(site.stored + site.by_app) == sorted(blobs)
    assert site.stored


@pytest.mark.parametrize(
    ("headers", "n_bytes"),
    [
        ({"Authorization": "Bearer other"}, 10),
        ({}, 10),
        ({**AUTHORIZED, "Expect": "100-continue"}, 10),
        (AUTHORIZED, 5 << 20),
    ],
)
async def test_any_other_upload_is_answered_by_the_app(site: Site, headers: dict[str, str], n_bytes: int) -> None:
    async with httpx.AsyncClient(headers=headers) as http:
        response = await http.put(f"{site.url}/file", content=bytes(n_bytes))
    assert (response.content, site.stored) == (b"the app received %d" % n_bytes, [])


async def test_rejected_upload_is_answered_by_the_app_with_its_whole_body(site: Site, client: BlobTransfer) -> None:
    site.rejects = True
    with pytest.raises(BadStatus) as error:
        await client.upload(f"{site.url}/file", "Bearer t", memoryview(DATA))
    assert (error.value.status, error.value.body) == (422, b"the app received %d" % len(DATA))


async def test_upload_whose_storing_fails_unexpectedly_is_answered_by_the_app(site: Site, client: BlobTransfer) -> None:
    site.fails = True
    await client.upload(f"{site.url}/file", "Bearer t", memoryview(DATA))
    assert (site.stored, site.by_app) == ([], [DATA])
    assert site.uploads._n_active == 0


async def test_upload_that_breaks_off_stores_nothing_and_frees_its_place(site: Site) -> None:
    with socket.create_connection(site.sock.getsockname()) as sock:
        sock.sendall(b"PUT /file HTTP/1.1\r\nAuthorization: Bearer t\r\nContent-Length: 1000\r\n\r\nhalf")
        await eventually(lambda: site.uploads._n_active == 1)
    await eventually(lambda: site.uploads._n_active == 0 and not site.transfers.connections)
    assert site.stored == []


async def test_cancelled_upload_ends_its_thread() -> None:
    """The server accepts the connection and never reads."""
    client = BlobTransfer(connect_s=5.0, stall_s=3600.0, follow_redirects=True, route=direct)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        upload = asyncio.create_task(client.upload(url, "", memoryview(bytes(64 << 20))), name="upload")
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            await asyncio.to_thread(connection.recv, 10)
            upload.cancel()
            await asyncio.wait({upload})
            await asyncio.to_thread(client._threads.shutdown)


async def test_upload_to_a_server_that_closes_the_connection_fails(client: BlobTransfer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        upload = asyncio.create_task(client.upload(url, "", memoryview(DATA)), name="upload")
        connection, _ = await asyncio.to_thread(server.accept)
        connection.close()
        with pytest.raises(DownloadFailed):
            await upload


async def _drip(writer: asyncio.StreamWriter, again: bytes) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(0.05)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_upload_that_drips_frees_its_place_at_its_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_server, "transfer_limit_s", lambda _: 0.5)
    _, writer = await asyncio.open_connection(*site.sock.getsockname())
    writer.write(b"PUT /file HTTP/1.1\r\nAuthorization: Bearer t\r\nContent-Length: 1000000\r\n\r\n")
    dripping = asyncio.create_task(_drip(writer, b"x"), name="drip")
    await eventually(lambda: site.uploads._n_active == 1)
    await eventually(lambda: site.uploads._n_active == 0)
    await dripping
    assert site.stored == []


@pytest.mark.parametrize("again", [b"HTTP/1.1 100 Continue\r\n\r\n", b"a: b\r\n", b"x"])
@pytest.mark.parametrize("direction", ["download", "upload"])
async def test_transfer_with_a_server_that_drips_ends_at_its_limit(
    client: BlobTransfer, monkeypatch: pytest.MonkeyPatch, direction: str, again: bytes
) -> None:
    monkeypatch.setattr(transfer, "transfer_limit_s", lambda _: 0.5)
    monkeypatch.setattr(transfer, "transfer_limit_s", lambda _: 0.5)
    first = {b"a: b\r\n": b"HTTP/1.1 200 OK\r\n", b"x": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"}

    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first.get(again, b""))
        await _drip(writer, again)
        ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/file"
    data = bytes(1000)
    transfers: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "upload": lambda: client.upload(url, "Bearer t", memoryview(data)),
        "download": lambda: client.download(url, "Bearer t", Download(ChunkRef(digest_of(data), 1 << 20), Buffers())),
    }
    async with asyncio.timeout(60.0):
        with pytest.raises(TransferTimedOut):
            await transfers[direction]()
        await ended.wait()
    server.close()
