"""Pullers that serve each other: what leaves the store, and what a peer can do wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import bind, create_app, server_loop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams.bus import Bus, HashSet, Renew
from rlboost.shared.streams.names import WEIGHT_PEERS, weight_claim
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard, digest_of
from rlboost.shared.weights.peers import selection, source
from rlboost.shared.weights.peers.blob_routes import MAX_CONCURRENT, blob_routes
from rlboost.shared.weights.peers.directory import CLAIM_S, PeerDirectory
from rlboost.shared.weights.peers.selection import BlobIndex
from rlboost.shared.weights.peers.source import STORE_ONLY_BYTES, PeerSource, PeerTransport
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import Puller, StoreSource
from tests.support.eventually import LIMIT_S, eventually
from tests.support.memory_bus import MemoryBus
from tests.support.service_process import TOKEN, ServiceProcess

JOB = "job-1"
KIB = 1 << 10
WEIGHTS = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8)
CHUNK_BYTES = 256 * KIB


async def publish(client: StoreClient, weights: np.typing.NDArray[np.uint8] = WEIGHTS) -> list[str]:
    """Publish version 0; return its chunks' digests."""
    publisher = Publisher(client, Waits(), chunk_bytes=CHUNK_BYTES)
    part = await publisher.publish(JOB, 0, 0, [Shard("w", "uint8", weights.shape, (0,), weights.shape, weights.data)])
    await publisher.commit(JOB, 0, expect=-1, part_digests=[part.digest], config_json="{}")
    return [chunk.digest for chunk in part.chunks]


async def sent(client: StoreClient) -> float:
    answer = await client._request("GET", "/metrics")
    (line,) = [
        line for line in answer.body.decode().splitlines() if line.startswith("rlboost_weight_store_bytes_out_total ")
    ]
    return float(line.split()[1])


def n_cached(directory: Path, peer: str = "peer-*") -> int:
    return sum(1 for _ in directory.glob(f"{peer}/chunks/*"))


def killed_in_the_middle(pids: Mapping[str, int], directory: Path, n: int) -> list[str]:
    """Kill `n` pullers that have not pulled everything, those with the fewest chunks; return their names."""
    killed: list[str] = []
    for name in sorted(pids, key=lambda name: n_cached(directory, name)):
        os.kill(pids[name], signal.SIGSTOP)  # on a busy machine one may be about to end
        is_done = (directory / f"{name}.digest").exists()
        os.kill(pids[name], signal.SIGCONT if is_done else signal.SIGKILL)
        killed += [] if is_done else [name]
        if len(killed) == n:
            return killed
    raise AssertionError(f"of {len(pids)} pullers only {killed} were not done")


def fetches_from_store(log: str) -> dict[str, list[float]]:
    """Return when each blob was fetched from the store, in order."""
    fetches: dict[str, list[float]] = defaultdict(list)
    # Processes share the log, so two entries may be on one line.
    for blob, at in re.findall(r'\{"blob": "(\w+)"[^}]*"event": "blob_from_store"[^}]*"timestamp": "([^"]+)"', log):
        fetches[blob].append(datetime.fromisoformat(at).timestamp())
    return {blob: sorted(times) for blob, times in fetches.items()}


async def test_store_sends_each_byte_about_once_to_16_pullers_with_3_killed(
    store: ServiceProcess, client: StoreClient, tmp_path: Path, redis_url: str
) -> None:
    chunks = await publish(client)
    command = [sys.executable, "-m", "tests.support.weight_peers", "--peers", "16", "--dir", str(tmp_path)]
    command += ["--store", store.url, "--redis", redis_url, "--token", TOKEN, "--job", JOB, "--version", "0"]
    with (tmp_path / "peers.log").open("wb") as log:
        pullers = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: ASYNC220 - forks
    assert pullers.stdout is not None
    line = await asyncio.to_thread(pullers.stdout.readline)
    pids = {f"peer-{number}": int(pid) for number, pid in enumerate(line.split())}
    try:
        await eventually(lambda: n_cached(tmp_path) > 16 * len(chunks) / 2)
        for name in killed_in_the_middle(pids, tmp_path, 3):
            del pids[name]
        await eventually(lambda: all((tmp_path / f"{name}.digest").exists() for name in pids))
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
        await asyncio.to_thread(pullers.wait, LIMIT_S)
        pullers.stdout.close()
    results = [(tmp_path / f"{name}.digest").read_text().split() for name in pids]
    assert {digest for digest, _, _ in results} == {digest_of(digest_of(WEIGHTS.data).encode())}
    logged = (tmp_path / "peers.log").read_text()
    fetches = fetches_from_store(logged)
    # A blob that a peer sends slowly comes from the store, too.
    n_fetches = sum(map(len, fetches.values())) + logged.count('"event": "peer_slow"')
    assert await sent(client) <= (n_fetches + 1) * CHUNK_BYTES, (
        "the store sent nothing else than these and the manifest"
    )
    # A claim expires under a peer that is killed, or that a busy machine starves; its blob is then fetched again.
    gaps = [after - before for times in fetches.values() for before, after in pairwise(times)]
    assert sum(gap < CLAIM_S for gap in gaps) <= 0.2 * len(chunks), fetches
    assert sum(int(from_peers) for *_, from_peers in results) > 10 * WEIGHTS.nbytes
    assert "debug" in logged
    assert TOKEN not in logged


class Rig:
    """One puller in this process, and peers that a test makes up."""

    def __init__(self, client: StoreClient, bus: Bus, directory: Path, site: str = "") -> None:
        self.bus = bus
        self.cache = Cache(directory)
        self.transport = PeerTransport(TOKEN)
        store = StoreSource(client, self.cache, concurrency=8)
        me = PeerDirectory(bus, "me", "here", site)
        limit = STORE_ONLY_BYTES if site else 0
        self.source = PeerSource(me, self.transport, store, self.cache, concurrency=8, store_only_bytes=limit)
        self.puller = Puller(client, self.cache, Waits(), source=self.source, limit_s=60)

    async def assert_pulls(self, weights: np.typing.NDArray[np.uint8] = WEIGHTS) -> None:
        pulled = await self.puller.pull(JOB, 0)
        ((_, data),) = pulled.tensors()
        assert data == weights.tobytes()

    @property
    def from_peers(self) -> int:
        return self.puller.last.from_peers

    @property
    def from_store(self) -> int:
        return self.puller.last.from_store


@pytest.fixture
async def rig(client: StoreClient, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(client, MemoryBus(), tmp_path / "cache")
    yield rig
    await rig.transport.close()
    rig.puller.close()


@asynccontextmanager
async def served(
    answer: Callable[[str], Response] | Callable[[str, Request], Awaitable[Response]],
) -> AsyncIterator[str]:
    """A peer that answers as it likes; its URL."""
    app = FastAPI()
    app.get("/v1/chunks/{digest}")(answer)

    sock, stop = bind("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.create_task(server_loop(app, sock)(stop), name="peer")
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    stop.set()
    await serving


@pytest.fixture
async def far(client: StoreClient, tmp_path: Path) -> AsyncIterator[Rig]:
    """A puller of a site."""
    far = Rig(client, MemoryBus(), tmp_path / "far", "far")
    yield far
    await far.transport.close()
    far.puller.close()


async def listed(rig: Rig, url: str, chunks: list[str], name: str = "other", site: str = "", lacks: int = 0) -> None:
    """Let a peer announce these chunks, without the last few."""
    await rig.bus.transact([HashSet(WEIGHT_PEERS, {name: ""})])
    index = BlobIndex(chunks)
    bitmap = index.encode_bitmap(set(chunks[:-lacks] if lacks else chunks))
    await PeerDirectory(rig.bus, name, "here", site).publish(url, {index.id: bitmap})


def chunks_by_digest() -> dict[str, bytes]:
    by_digest = [WEIGHTS[at : at + CHUNK_BYTES].tobytes() for at in range(0, WEIGHTS.nbytes, CHUNK_BYTES)]
    return {digest_of(chunk): chunk for chunk in by_digest}


async def test_chunks_held_by_peers_are_not_fetched_from_the_store(client: StoreClient, rig: Rig) -> None:
    chunks, by_digest = await publish(client), chunks_by_digest()
    async with served(lambda digest: Response(by_digest[digest])) as url:
        await listed(rig, url, chunks)
        await rig.assert_pulls()
    assert (rig.from_peers, rig.from_store) == (WEIGHTS.nbytes, 0)


@asynccontextmanager
async def real_peer(cache: Cache) -> AsyncIterator[httpx.AsyncClient]:
    """What a worker serves of its cache, and its metrics."""
    app = create_app("worker", guard=Guard.of_token(TOKEN), not_ready_reason=lambda: None)
    sent = Counter("sent", "bytes", registry=CollectorRegistry())
    app.include_router(blob_routes(cache, TOKEN, sent, asyncio.Semaphore(MAX_CONCURRENT)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://worker") as http:
        yield http


async def test_proof_sent_to_a_peer_is_valid_for_one_blob_only(client: StoreClient, rig: Rig) -> None:
    """Where peers are is read from Redis, where anybody may have written."""
    chunks, asked = await publish(client), dict[str, Request]()

    async def listen(digest: str, request: Request) -> Response:
        asked[digest] = request
        return Response(status_code=404)

    async with served(listen) as url:
        await listed(rig, url, chunks)
        await rig.assert_pulls()
    assert len(asked) > 1
    assert not any(
        TOKEN in value for request in asked.values() for value in (*request.headers.values(), str(request.url))
    )
    async with real_peer(rig.cache) as peer, httpx.AsyncClient(base_url=client.url) as store:

        async def status(http: httpx.AsyncClient, path: str, given: str) -> int:
            return (await http.get(path, headers={"Authorization": given})).status_code

        one, other = list(asked)[:2]
        given = asked[one].headers["Authorization"]
        assert await status(peer, f"/v1/chunks/{one}", given) == 200
        assert await status(peer, f"/v1/chunks/{other}", given) == 401
        assert await status(peer, "/metrics", given) == 401
        assert await status(store, f"/v1/chunks/{one}", given) == 401
        assert await status(store, "/v1/models", given) == 401
        assert await status(peer, f"/v1/chunks/{one}", f"Bearer {TOKEN}") == 401, "a peer accepts proofs only"
        assert await status(peer, f"/v1/chunks/{one}", "") == 401


async def test_peer_that_expects_the_token_itself_costs_only_time(client: StoreClient, rig: Rig) -> None:
    chunks = await publish(client)

    async def wants_the_token(digest: str, request: Request) -> Response:
        known = request.headers["Authorization"] == f"Bearer {TOKEN}"
        return Response(chunks_by_digest()[digest] if known else b"", status_code=200 if known else 401)

    async with served(wants_the_token) as url:
        await listed(rig, url, chunks)
        with capture_logs() as logs:
            await rig.assert_pulls()
    assert rig.from_peers == 0
    (first, *_) = [line for line in logs if line["event"] == "peer_failed"]
    assert "another version of rlboost" in first["error"]


async def test_peer_with_a_digest_mismatch_is_never_asked_again(client: StoreClient, rig: Rig) -> None:
    chunks, asked = await publish(client), list[str]()

    def lie(digest: str) -> Response:
        asked.append(digest)
        return Response(bytes(CHUNK_BYTES + len(asked) % 3 - 1))

    async with served(lie) as url:
        await listed(rig, url, chunks)
        await rig.assert_pulls()
        assert 1 <= len(asked) <= 4
        asked.clear()
        rig.cache.prune(set(), [])
        await rig.assert_pulls()
        assert asked == []
    assert rig.from_store == WEIGHTS.nbytes


async def test_slow_peer_is_replaced_by_another_source(client: StoreClient, rig: Rig) -> None:
    chunks, by_digest, asked = await publish(client), chunks_by_digest(), list[str]()

    def trickle(digest: str) -> Response:
        asked.append(digest)

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, CHUNK_BYTES, KIB):
                yield by_digest[digest][at : at + KIB]
                await asyncio.sleep(0.05)

        return StreamingResponse(body())

    async with served(trickle) as slow, served(lambda digest: Response(by_digest[digest])) as fast:
        await listed(rig, slow, chunks, "slow")
        await listed(rig, fast, chunks, "fast")
        async with asyncio.timeout(60.0):  # the slow one alone would take 20 minutes
            await rig.assert_pulls()
    assert 1 <= len(asked) <= 4


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_peer_without_the_blobs_it_announces_costs_only_time(client: StoreClient, rig: Rig, status: int) -> None:
    chunks = await publish(client)
    async with served(lambda _: Response(status_code=status, headers={"Location": "http://127.0.0.1:9/"})) as url:
        await listed(rig, url, chunks)
        await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes


def _body_of(digest: str, n_bytes: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {CHUNK_BYTES}\r\nETag: {digest}\r\n\r\n".encode() + bytes(n_bytes)


DRIPS: dict[str, tuple[bytes, bytes]] = {
    "a byte of the body": (_body_of("x", 0), b"x"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a byte of the status": (b"HTTP/1.1 2", b"0"),
    "a header": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "most of the body, then a byte": (_body_of("x", CHUNK_BYTES // 16), b"x"),
}
"""What a peer sends at once, and then again and again."""


@pytest.mark.parametrize("drip", DRIPS)
async def test_peer_that_drips_costs_seconds(client: StoreClient, rig: Rig, drip: str) -> None:
    chunks = await publish(client)
    first, again = DRIPS[drip]

    answering = set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(first)
                while True:
                    writer.write(again)
                    await writer.drain()
                    await asyncio.sleep(0.2)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await listed(rig, f"http://127.0.0.1:{port}", chunks)
    async with asyncio.timeout(60.0):
        await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes
    server.close()
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)


async def test_peer_that_is_always_busy_delays_a_pull_once(
    client: StoreClient, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_IDLE_S", 1.0)
    chunks = await publish(client)
    async with served(lambda _: Response(status_code=503)) as url:
        await listed(rig, url, chunks)
        async with asyncio.timeout(60.0):
            await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes


async def test_claims_that_never_end_delay_a_pull_once(
    client: StoreClient, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_IDLE_S", 1.0)
    chunks = await publish(client)
    await rig.bus.transact([Renew(weight_claim(digest), "other", 1e9) for digest in chunks])
    async with asyncio.timeout(60.0):
        await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes


async def test_dead_peer_costs_only_time(client: StoreClient, rig: Rig) -> None:
    await listed(rig, "http://127.0.0.1:9", await publish(client))
    await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes


async def test_blob_claimed_but_never_fetched_is_taken_over(client: StoreClient, rig: Rig) -> None:
    chunks = await publish(client)
    other = PeerDirectory(rig.bus, "other", "here")
    assert all([await other.claim(digest) for digest in chunks[:5]])
    await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes


async def test_without_redis_everything_comes_from_the_store(client: StoreClient, tmp_path: Path) -> None:
    bus = MemoryBus()
    bus.down = True
    rig = Rig(client, bus, tmp_path / "cache")
    await publish(client)
    await rig.assert_pulls()
    assert rig.from_store == WEIGHTS.nbytes
    await rig.transport.close()
    rig.puller.close()


async def test_small_pull_uses_the_store_alone(client: StoreClient, rig: Rig) -> None:
    chunks, asked = await publish(client), list[str]()
    rig.source._store_only_bytes = WEIGHTS.nbytes + 1

    def answer(digest: str) -> Response:
        asked.append(digest)
        return Response()

    async with served(answer) as url:
        await listed(rig, url, chunks)
        await rig.assert_pulls()
    assert asked == []


# --- sites ------------------------------------------------------------------------------------------------------------


def claims_in(logs: list[MutableMapping[str, Any]]) -> set[bool]:
    """Return whether blobs were fetched from the store with a claim."""
    return {line["claimed"] for line in logs if line["event"] == "blob_from_store"}


async def test_small_pull_of_a_site_asks_its_workers_and_no_others(client: StoreClient, far: Rig) -> None:
    chunks, by_digest, asked = await publish(client), chunks_by_digest(), list[str]()

    def elsewhere(digest: str) -> Response:
        asked.append(digest)
        return Response(by_digest[digest])

    assert WEIGHTS.nbytes < STORE_ONLY_BYTES
    async with served(lambda digest: Response(by_digest[digest])) as same, served(elsewhere) as other:
        await listed(far, same, chunks, "same", "far", lacks=1)
        await listed(far, other, chunks, "other", "near")
        await listed(far, other, chunks, "unlabelled")
        await far.assert_pulls()
    assert asked == []
    assert (far.from_peers, far.from_store) == (WEIGHTS.nbytes - CHUNK_BYTES, CHUNK_BYTES)


async def test_claims_hold_for_one_site(client: StoreClient, far: Rig) -> None:
    chunks = await publish(client)
    for site in ("", "near"):
        await far.bus.transact([Renew(weight_claim(digest, site), "other", 1e9) for digest in chunks])
    with capture_logs() as logs:
        await far.assert_pulls()
    assert far.from_store == WEIGHTS.nbytes
    assert claims_in(logs) == {True}


async def test_site_without_redis_fetches_from_its_workers_and_waits_before_the_store(
    client: StoreClient, far: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_IDLE_S", 1.0)
    chunks, by_digest = await publish(client), chunks_by_digest()

    def cut(digest: str) -> Response:
        cast("MemoryBus", far.bus).down = True
        return Response(by_digest[digest])

    async with served(cut) as url:
        await listed(far, url, chunks, "same", "far", lacks=1)
        await far.bus.transact([Renew(weight_claim(chunks[-1], "far"), "same", 1e9)])
        with capture_logs() as logs:
            await far.assert_pulls()
    assert (far.from_peers, far.from_store) == (WEIGHTS.nbytes - CHUNK_BYTES, CHUNK_BYTES)
    assert claims_in(logs) == {False}, "another may be fetching the chunk, so it was left until the idle limit"


async def test_site_without_redis_asks_a_worker_again_that_was_unreachable(
    client: StoreClient, far: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "UNREACHABLE_S", 0.1)
    monkeypatch.setattr(selection, "MAX_IDLE_S", 5.0)
    chunks, by_digest, bus = await publish(client), chunks_by_digest(), cast("MemoryBus", far.bus)

    def answer(digest: str) -> Response:
        was_down, bus.down = bus.down, True
        return Response(by_digest[digest]) if was_down else Response(status_code=500)

    async with served(answer) as url:
        await listed(far, url, chunks, "same", "far")
        await far.assert_pulls()
    assert (far.from_peers, far.from_store) == (WEIGHTS.nbytes, 0)


async def test_worker_that_is_slow_for_its_site_is_asked_no_more(
    client: StoreClient, far: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_ELSEWHERE_S", 0.2)
    chunks, by_digest, asked = await publish(client), chunks_by_digest(), list[str]()

    async def from_afar(digest: str, _: Request) -> Response:
        asked.append(digest)
        await asyncio.sleep(1.0)
        return Response(by_digest[digest])

    far.source._speeds.append(("", 1e9))  # the last pull's, from the store
    async with served(from_afar) as url:
        await listed(far, url, chunks, "liar", "far")
        with capture_logs() as logs:
            await far.assert_pulls()
    assert {line["peer"] for line in logs if line["event"] == "peer_not_of_site"} == {"liar"}
    assert 1 <= len(asked) <= selection.MAX_PER_PEER
    assert far.from_store == WEIGHTS.nbytes - CHUNK_BYTES * len(asked)
