"""The swarm: pullers that serve each other, so that what leaves the weight store does not grow with their number.

A pull runs some slots, which ask the picker what to do next and do it, and one loop that looks into the directory and
says there what has come. Another loop, `announce`, keeps this peer in the directory between pulls. Without Redis a pull
goes on from the store alone. No byte counts before it has its digest: a peer that sent others is never asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

import structlog

from shared.errors import BusUnavailable
from shared.lifecycle import until_stop
from shared.weights.cache import Cache
from shared.weights.download import Download
from shared.weights.manifest import ChunkRef
from shared.weights.peers import picker as rules
from shared.weights.peers.catalogue import Catalogue, blobs, holdings
from shared.weights.peers.directory import CLAIM_S, LEASE_S, Directory, Peer
from shared.weights.peers.picker import FromPeer, FromStore, Picker, Wait
from shared.weights.peers.transport import PeerAway, PeerBusy, PeerFailed, PeerLacks, PeerLied, PeerSlow, PeerTransport
from shared.weights.source import Arrived, StoreSource, Traffic

log = structlog.get_logger(__name__)

ALONE_BYTES = 32 << 20
"""A pull of less comes from the store alone: it is over before peers could tell each other who has what."""


class Swarm:
    """`Source` of peers first and the weight store last."""

    def __init__(
        self,
        directory: Directory,
        transport: PeerTransport,
        store: StoreSource,
        cache: Cache,
        *,
        concurrency: int,
        alone_bytes: int = ALONE_BYTES,
    ) -> None:
        """Use open connections; `concurrency` transfers at a time."""
        self._directory = directory
        self._transport = transport
        self._store = store
        self._cache = cache
        self._concurrency = concurrency
        self._alone_bytes = alone_bytes
        self._catalogues: tuple[Catalogue, ...] = ()
        self._left: dict[str, float] = {}
        self.url = ""
        """Where others reach this peer; while it is empty it serves nobody."""

    def offer(self, catalogues: Sequence[Catalogue]) -> None:
        """See `Source.offer`."""
        self._catalogues = tuple(catalogues)

    async def announce(self, stop: asyncio.Event) -> None:
        """Keep this peer in the directory until the stop, and leave it then."""
        while not await until_stop(stop, LEASE_S / 3):
            await self._quietly(self._tell())
        if self.url:
            await self._quietly(self._directory.withdraw())

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, arrived: Arrived) -> None:
        """See `Source.fetch`."""
        if sum(blob.n_bytes for blob in blobs) < self._alone_bytes:
            await self._store.fetch(blobs, traffic, arrived)
            await self._quietly(self._tell())  # most of a large version may have been there already
            return
        pull = _Pull(blobs, traffic, arrived, Picker([blob.digest for blob in blobs], _seed(), self._left))
        await self._see(pull)
        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look(pull), name="peers-look")
                slots = [group.create_task(self._slot(pull), name=f"peers-slot-{n}") for n in range(self._concurrency)]
                await asyncio.wait(slots)
                looking.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        await self._quietly(self._tell())

    async def _look(self, pull: _Pull) -> None:
        # Often enough for a small model, and not too often for many peers of a large one.
        interval_s = min(1.0, 0.2 + len(pull.blobs) / 100_000)
        while True:
            await asyncio.sleep(interval_s)
            await self._see(pull)
            pull.changed.set()

    async def _see(self, pull: _Pull) -> None:
        """Say what has come, and take note of what others have."""
        try:
            await self._tell()
            peers = await self._directory.look()
        except BusUnavailable as error:
            log.warning("peers_unknown", error=str(error))
            peers = []
        ours = {catalogue.id for catalogue in self._catalogues}
        pull.peers = {peer.name: peer for peer in peers if peer.holds.keys() & ours}
        held = {peer.name: blobs(self._catalogues, peer.holds) for peer in pull.peers.values()}
        pull.picker.see(held, time.monotonic())

    async def _slot(self, pull: _Pull) -> None:
        while not pull.picker.done:
            match pull.picker.next(time.monotonic()):
                case FromPeer() as move:
                    await self._from_peer(pull, move)
                case FromStore() as move:
                    await self._from_store(pull, move)
                case Wait():
                    await pull.wait()
                    continue
            pull.changed.set()

    async def _from_peer(self, pull: _Pull, move: FromPeer) -> None:
        peer, download = pull.peers.get(move.peer), Download(pull.blobs[move.digest])
        if peer is None:
            log.debug("peer_vanished", peer=move.peer)
            pull.picker.lacks(move)
            return
        try:
            await self._transport.fetch(peer.url, download)
            if not await asyncio.to_thread(self._cache.keep, download.blob, download.data):
                raise PeerLied(f"blob {move.digest} came with another digest")
        except PeerFailed as error:
            _blame(pull.picker, move, error)
            if not isinstance(error, PeerBusy):
                log.warning("peer_failed", peer=peer.name, url=peer.url, kind=type(error).__name__, error=str(error))
        else:
            pull.picker.arrived(move)
            await pull.arrived(download.blob, None)
        finally:
            pull.traffic.from_peers += download.n_received

    async def _from_store(self, pull: _Pull, move: FromStore) -> None:
        blob = pull.blobs[move.digest]
        if move.claim and not await self._claimed(move.digest):
            pull.picker.refused(move, time.monotonic())
            return
        log.debug("from_store", blob=move.digest, claimed=move.claim)
        async with self._claiming(move.digest):
            error = await self._store.bring(blob, pull.traffic)
            await self._quietly(self._tell())  # before the claim runs out
        if error is not None:
            await self._quietly(self._directory.drop_claim(move.digest))
        pull.picker.arrived(move)
        await pull.arrived(blob, error)

    async def _claimed(self, digest: str) -> bool:
        try:
            return await self._directory.claim(digest)
        except BusUnavailable:
            return True

    @asynccontextmanager
    async def _claiming(self, digest: str) -> AsyncIterator[None]:
        """Keep the claim for as long as the transfer takes. It stays for a moment, until others have looked."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(CLAIM_S / 3)
                await self._quietly(self._directory.keep_claim(digest))

        keeping = asyncio.create_task(keep(), name="peers-claim")
        try:
            yield
        finally:
            keeping.cancel()

    async def _tell(self) -> None:
        if self.url:
            await self._directory.tell(self.url, holdings(self._catalogues, self._cache.verified))

    @staticmethod
    async def _quietly(call: Awaitable[None]) -> None:
        with contextlib.suppress(BusUnavailable):
            await call


class _Pull:
    """One pull under way."""

    def __init__(self, blobs: Sequence[ChunkRef], traffic: Traffic, arrived: Arrived, picker: Picker) -> None:
        self.blobs = {blob.digest: blob for blob in blobs}
        self.traffic = traffic
        self.arrived = arrived
        self.picker = picker
        self.peers: dict[str, Peer] = {}
        self.changed = asyncio.Event()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


def _seed() -> int:
    return random.getrandbits(32)


def _blame(picker: Picker, move: FromPeer, error: PeerFailed) -> None:
    now = time.monotonic()
    match error:
        case PeerLacks():
            picker.lacks(move)
        case PeerLied():
            picker.leave(move, math.inf)
        case PeerAway():
            picker.leave(move, now + rules.LEFT_AWAY_S)
        case PeerSlow():
            picker.rest(move, now + rules.REST_SLOW_S)
        case PeerBusy():
            picker.rest(move, now + rules.REST_BUSY_S)
        case _:
            picker.rest(move, now + rules.REST_FAILED_S)
