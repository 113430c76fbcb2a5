"""Participants that take and give nothing, played by threads of this process with no more than a join token."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

from rlboost.services.rollout_worker.adapters.manager_http import join
from rlboost.services.rollout_worker.ports import Membership
from rlboost.shared.errors import RLBoostError
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.weights.access import IssuedAccess
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.peers.directory import PeerDirectory
from rlboost.shared.weights.peers.selection import ALL, BlobIndex
from rlboost.shared.weights.peers.source import PeerSource, PeerTransport
from rlboost.shared.weights.puller import Puller, StoreSource
from tests.support.sim_worker import SimWorker

JOIN_LIMIT_S = 20.0
PULL_LIMIT_S = 120.0
"""A pull while a peer drips takes seconds; this machine is busy."""
_BEAT_S = 0.3
_SLOTS = 100_000


class Participant:
    """Runs a coroutine in a thread until it ends or is stopped."""

    def __init__(self, live: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        self._live = live
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-participant", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for the end."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            live = asyncio.ensure_future(self._live(stop))
            while not self._stop.is_set() and not (await asyncio.wait({live}, timeout=0.1))[0]:
                pass
            stop.set()
            await live

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - `stop` re-raises it
            self.error = error


def hold(url: str, token: str, *, undead: bool) -> Participant:
    """Join as a worker, take samples and generate nothing; leave without a word.

    If it is `undead`, its lease has no expiry, and it is gone as soon as it has a sample.
    """

    async def live(stop: asyncio.Event) -> None:
        with suppress(RLBoostError):  # Redis or the manager may be away, and it may be dismissed
            membership = await join(url, token, "holder", "preemptible", JOIN_LIMIT_S)
            bus = _bus(membership)
            worker = SimWorker(bus, membership.worker, slots=_SLOTS, own_stream=True, is_silent=True)
            worker.leave = worker.flush  # type: ignore[method-assign]  # it does not drain
            try:
                await worker.join()
                while not stop.is_set() and not worker.dismissed:
                    await worker.send_heartbeat()
                    await worker.execute_commands()
                    if undead and worker.held:
                        await bus.command("SET", names.worker_lease(worker.id), "1")
                        return
                    await asyncio.sleep(_BEAT_S)
            finally:
                await bus.close()

    return Participant(live)


def drip(url: str, token: str, job_id: str) -> Participant:
    """Announce a job's newest weights as a peer, send a byte now and then, and pull them as another worker.

    Its error is `WaitTimedOut` if the pull does not end within `PULL_LIMIT_S`.
    """

    async def live(_: asyncio.Event) -> None:
        dripping = await join(url, token, "drip", "preemptible", JOIN_LIMIT_S)
        victim = await join(url, token, "victim", "preemptible", JOIN_LIMIT_S)
        server = await asyncio.start_server(_drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            # Both stay in the list of workers that may have an entry in the peer directory only once they have joined.
            for membership in (dripping, victim):
                await SimWorker(membership.bus, membership.worker, own_stream=True).join()
            await _pull(dripping, victim, f"http://127.0.0.1:{port}", job_id)
        finally:
            server.close()
            for membership in (dripping, victim):
                await _bus(membership).close()

    return Participant(live)


async def _pull(dripping: Membership, victim: Membership, peer_url: str, job_id: str) -> None:
    access = IssuedAccess(victim.store_credential, victim.manifest_key)
    directory = PeerDirectory(victim.bus, victim.worker, "chaos")
    with tempfile.TemporaryDirectory() as folder, closing(Cache(Path(folder))) as cache:
        transport = PeerTransport(victim.peer_key)
        async with StoreClient(victim.weight_store_url, access) as client:
            head = await client.head(job_id)
            if head is None:
                return  # nothing is published yet
            manifest = await client.manifest(job_id, head.version)
            index = BlobIndex([chunk.digest for chunk in manifest.chunks()])
            await PeerDirectory(dripping.bus, dripping.worker, "chaos").publish(peer_url, {index.id: ALL})
            store = StoreSource(client, cache, concurrency=8)
            source = PeerSource(directory, transport, store, cache, concurrency=8, store_only_bytes=0)
            puller = Puller(client, cache, Waits(), source=source, limit_s=PULL_LIMIT_S)
            try:
                await puller.pull(job_id, head.version)
            finally:
                puller.close()
                await transport.close()


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Cancelled only as its loop ends: asyncio logs a handler that ends so.
    with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4194304\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(1.0)
    writer.close()


def _bus(membership: Membership) -> RedisBus:
    assert isinstance(membership.bus, RedisBus)
    return membership.bus
