"""Downloads of files on a server that also runs an app, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, Counter

from rlboost.shared.errors import Corrupt
from rlboost.shared.http import transfer_server
from rlboost.shared.http.server import bind, server_loop
from rlboost.shared.http.transfer_server import FoundFile, TransferRequest, TransferServer
from rlboost.shared.proxies import direct
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from rlboost.shared.weights.transfer import BadStatus, BlobDownloader, Buffers, Download, DownloadFailed, Unreachable
from tests.support.eventually import eventually

DATA = os.urandom(3 << 20)
BLOB = ChunkRef(digest_of(DATA), len(DATA))


class Site:
    """A server with an app, and one file at `/file`."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(DATA)
        self.path = path
        self.sent = Counter("sent", "bytes", registry=CollectorRegistry())
        self.slots = asyncio.Semaphore(2)
        self.transfers = TransferServer(self.find, self.sent, slots=self.slots)
        self.app = FastAPI()
        self.sock = bind("127.0.0.1", 0)
        self.sock.listen()  # so that a client may connect before the server runs
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"

        @self.app.get("/file")
        async def from_app() -> Response:
            return Response(b"from the app")

        @self.app.post("/file")
        async def post() -> str:
            return "posted"

    def find(self, request: TransferRequest) -> FoundFile | None:
        is_file = request.path == "/file" and request.authorization == "Bearer t"
        return FoundFile(self.path.open("rb", buffering=0), "tag") if is_file else None

    @property
    def n_sent(self) -> float:
        return float(self.sent._value.get())


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site, stop = Site(tmp_path / "file"), asyncio.Event()
    serving = asyncio.create_task(server_loop(site.app, site.sock, transfers=site.transfers)(stop), name="site")
    yield site
    stop.set()
    await serving


@asynccontextmanager
async def downloader(stall_s: float = 5.0) -> AsyncIterator[BlobDownloader]:
    one = BlobDownloader(connect_s=2.0, stall_s=stall_s, follow_redirects=True, route=direct)
    yield one
    one.close()


async def test_file_is_sent_past_the_app_on_one_connection(site: Site) -> None:
    async with httpx.AsyncClient(headers={"Authorization": "Bearer t"}) as http:
        for _ in range(3):
            response = await http.get(f"{site.url}/file")
            assert (response.status_code, response.content, response.headers["ETag"]) == (200, DATA, '"tag"')
    await eventually(lambda: site.n_sent == 3 * len(DATA))  # counted after the last byte has left


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer other"},
        {},
        {"Authorization": "Bearer t", "Range": "bytes=5-"},
        {"Authorization": "Bearer t", "If-Match": "tag"},
        {"Authorization": "Bearer t", "Connection": "close"},
    ],
)
async def test_any_other_request_is_answered_by_the_app(site: Site, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{site.url}/file", headers=headers)).content == b"from the app"
    assert site.n_sent == 0


async def test_app_takes_a_connection_over_with_everything_received(site: Site) -> None:
    """A request that arrives in pieces, after a download on the same connection, followed at once by another one."""
    reader, writer = await asyncio.open_connection(*site.sock.getsockname())
    writer.write(b"GET /file HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert await reader.readexactly(len(DATA)) == DATA
    post = b"POST /file HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    for piece in (post[:8], post[8:], b"GET /file HTTP/1.1\r\nHost: x\r\n\r\n"):
        writer.write(piece)
        await writer.drain()
    assert (await reader.readuntil(b'"posted"')).startswith(b"HTTP/1.1 200 OK")
    await reader.readuntil(b"from the app")
    writer.close()
    await writer.wait_closed()


async def test_request_beyond_the_slots_is_answered_by_the_app(site: Site) -> None:
    async with site.slots, site.slots, httpx.AsyncClient(headers={"Authorization": "Bearer t"}) as http:
        assert (await http.get(f"{site.url}/file")).content == b"from the app"


async def test_client_that_disappears_frees_its_slot(site: Site) -> None:
    with socket.create_connection(site.sock.getsockname()) as sock:
        sock.sendall(b"GET /file HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
        await asyncio.to_thread(sock.recv, 100)
    await eventually(lambda: not site.transfers.connections)
    await eventually(lambda: site.slots._value == 2)


async def test_client_that_reads_a_little_now_and_then_frees_its_slot(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_server, "transfer_limit_s", lambda _: 0.5)
    os.truncate(site.path, 1 << 30)
    reader, writer = await asyncio.open_connection(*site.sock.getsockname(), limit=1 << 10)
    writer.write(b"GET /file HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
    await reader.read(100)
    await eventually(lambda: site.slots._value == 1)
    async with asyncio.timeout(20.0):
        while site.slots._value < 2:
            await reader.read(100)
            await asyncio.sleep(0.05)
    writer.close()


async def test_stop_ends_a_download_that_the_client_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_server, "_STOP_S", 0.2)
    site, stop = Site(tmp_path / "file"), asyncio.Event()
    os.truncate(site.path, 1 << 30)
    serving = asyncio.create_task(server_loop(site.app, site.sock, transfers=site.transfers)(stop), name="site")
    with socket.create_connection(site.sock.getsockname()) as sock:
        sock.sendall(b"GET /file HTTP/1.1\r\nAuthorization: Bearer t\r\n\r\n")
        await asyncio.to_thread(sock.recv, 100)
        stop.set()
        async with asyncio.timeout(30.0):
            await serving


async def test_download_resumes_after_the_bytes_it_has(site: Site) -> None:
    @site.app.get("/part")
    async def part() -> Response:
        return Response(DATA[1000:], 206)

    async with downloader() as http:
        download = Download(BLOB, Buffers())
        download.data[:1000], download.n_bytes = DATA[:1000], 1000
        await http.download(f"{site.url}/part", "", download)
        assert (bytes(download.data), download.n_received) == (DATA, len(DATA) - 1000)


async def test_download_of_a_longer_body_is_corrupt(site: Site) -> None:
    async with downloader() as http:
        with pytest.raises(Corrupt, match="longer"):
            await http.download(f"{site.url}/file", "Bearer t", Download(ChunkRef(BLOB.digest, 1000), Buffers()))


async def test_credential_does_not_follow_a_redirect(site: Site) -> None:
    @site.app.get("/moved")
    async def moved() -> Response:
        return Response(status_code=307, headers={"Location": f"{site.url}/file"})

    async with downloader() as http:
        download = Download(BLOB, Buffers())
        await http.download(f"{site.url}/moved", "Bearer t", download)
        assert bytes(download.data[: download.n_bytes]) == b"from the app", "the file needs the credential"
        with pytest.raises(BadStatus, match="404"):
            await http.download(f"{site.url}/absent", "Bearer t", Download(BLOB, Buffers()))


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://127.0.0.1:9", "http://a..b"])
async def test_download_from_an_unusable_url_is_unreachable(url: str) -> None:
    async with downloader() as http:
        with pytest.raises(Unreachable):
            await http.download(f"{url}/file", "", Download(BLOB, Buffers()))


async def test_file_truncated_while_it_is_sent_breaks_the_download_off(site: Site) -> None:
    blob = ChunkRef(BLOB.digest, 1 << 30)
    os.truncate(site.path, blob.n_bytes)

    def truncate() -> None:
        if download.n_bytes < (1 << 22):
            os.truncate(site.path, 1 << 24)

    async with downloader() as http:
        download = Download(blob, Buffers())
        with pytest.raises(DownloadFailed):
            await http.download(f"{site.url}/file", "Bearer t", download, truncate)


async def test_cancelled_download_ends_its_thread(site: Site) -> None:
    """The server accepts the connection and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with downloader(stall_s=600.0) as http:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/file"
            download = asyncio.create_task(http.download(url, "", Download(BLOB, Buffers())), name="download")
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                await asyncio.to_thread(connection.recv, 10)
                download.cancel()
                await asyncio.wait({download})
                await asyncio.to_thread(http._threads.shutdown)
