"""Fetch blobs from peers first and the weight store last, so that the store's egress does not grow with the fleet.

Peers are untrusted: every blob is digest-checked, and a peer that sent other bytes is never asked again. Without Redis
everything comes from the store.

Two loops:

- `announce` consumes the cache's content and produces this peer's entry in the peer directory, every third of
  `LEASE_S`. It waits for nothing else and ends at the stop, when it withdraws the entry.
- `fetch` consumes the blobs of one pull and produces them in the cache. Its slots wait for `PeerSelection.next`; a
  finished transfer or a refresh of the directory unblocks them. It ends when every blob is settled, or with the first
  error of the `on_settled` callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.peers import selection as rules
from rlboost.shared.weights.peers.blob_index import BlobIndex, bitmaps_of, blobs_in
from rlboost.shared.weights.peers.directory import CLAIM_S, LEASE_S, Peer, PeerDirectory
from rlboost.shared.weights.peers.selection import FromPeer, FromStore, PeerSelection, Wait
from rlboost.shared.weights.peers.transport import (
    BlobNotHeld,
    DigestMismatch,
    PeerBusy,
    PeerFailed,
    PeerSlow,
    PeerTransport,
    PeerUnreachable,
)
from rlboost.shared.weights.source import OnSettled, StoreSource, Traffic
from rlboost.shared.weights.transfer.download import Buffers, Download

log = structlog.get_logger(__name__)

STORE_ONLY_BYTES = 32 << 20
"""A smaller pull uses the store alone: it ends before peers could learn what the others hold."""


class PeerSource:
    """`Source` that prefers peers to the weight store."""

    def __init__(
        self,
        directory: PeerDirectory,
        transport: PeerTransport,
        store: StoreSource,
        cache: Cache,
        *,
        concurrency: int,
        store_only_bytes: int = STORE_ONLY_BYTES,
    ) -> None:
        """Use open connections; run `concurrency` transfers at a time."""
        self._directory = directory
        self._transport = transport
        self._store = store
        self._cache = cache
        self._concurrency = concurrency
        self._store_only_bytes = store_only_bytes
        self._buffers = Buffers()
        self._indexes: tuple[BlobIndex, ...] = ()
        self._excluded: dict[str, float] = {}
        self.url = ""
        """URL under which other peers reach this one; empty if it serves none."""

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        """See `Source.offer`."""
        self._indexes = tuple(indexes)

    async def has_chunks_at_hand(self) -> bool:
        """See `Source.has_chunks_at_hand`."""
        return False

    async def announce(self, stop: asyncio.Event) -> None:
        """Renew this peer's directory entry until the stop, then withdraw it."""
        while not await until_stop(stop, LEASE_S / 3):
            await self._ignoring_outage(self._publish())
        if self.url:
            await self._ignoring_outage(self._directory.withdraw())

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
        """See `Source.fetch`."""
        if sum(blob.n_bytes for blob in blobs) < self._store_only_bytes:
            await self._store.fetch(blobs, traffic, on_settled)
            await self._ignoring_outage(self._publish())  # most of a large version may have been cached already
            return
        pull = _Pull(
            blobs, traffic, on_settled, PeerSelection([blob.digest for blob in blobs], _seed(), self._excluded)
        )
        await self._refresh(pull)
        try:
            async with asyncio.TaskGroup() as group:
                refreshing = group.create_task(self._keep_fresh(pull), name="peers-refresh")
                slots = [group.create_task(self._slot(pull), name=f"peers-slot-{n}") for n in range(self._concurrency)]
                await asyncio.wait(slots)
                refreshing.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        await self._ignoring_outage(self._publish())

    async def _keep_fresh(self, pull: _Pull) -> None:
        # Frequent for a small model, rare for many peers with a large one.
        interval_s = min(1.0, 0.2 + len(pull.blobs) / 100_000)
        while True:
            await asyncio.sleep(interval_s)
            await self._refresh(pull)
            pull.changed.set()

    async def _refresh(self, pull: _Pull) -> None:
        """Publish what this peer holds, and read what the others hold."""
        try:
            await self._publish()
            peers = await self._directory.peers()
        except BusUnavailable as error:
            log.warning("peer_directory_unavailable", error=str(error))
            peers = []
        ours = {index.id for index in self._indexes}
        pull.peers = {peer.name: peer for peer in peers if peer.holds.keys() & ours}
        held = {peer.name: blobs_in(self._indexes, peer.holds) for peer in pull.peers.values()}
        pull.selection.update(held, time.monotonic())

    async def _slot(self, pull: _Pull) -> None:
        while not pull.selection.is_done:
            match pull.selection.next(time.monotonic()):
                case FromPeer() as fetch:
                    await self._from_peer(pull, fetch)
                case FromStore() as fetch:
                    await self._from_store(pull, fetch)
                case Wait():
                    await pull.wait()
                    continue
            pull.changed.set()

    async def _from_peer(self, pull: _Pull, fetch: FromPeer) -> None:
        peer = pull.peers.get(fetch.peer)
        if peer is None:
            log.debug("peer_gone", peer=fetch.peer)
            pull.selection.on_not_held(fetch)
            return
        download = Download(pull.blobs[fetch.digest], self._buffers)
        try:
            keep = partial(self._cache.store, download.blob, download.data)
            if not await self._transport.fetch(peer.url, download, keep):
                raise DigestMismatch(f"blob {fetch.digest} came with another digest")
        except PeerFailed as error:
            download.release()
            _record_failure(pull.selection, fetch, error)
            if not isinstance(error, PeerBusy):
                log.warning("peer_failed", peer=peer.name, url=peer.url, kind=type(error).__name__, error=str(error))
        else:
            download.release()
            pull.selection.on_settled(fetch)
            await pull.on_settled(download.blob, None)
        finally:
            pull.traffic.from_peers += download.n_received

    async def _from_store(self, pull: _Pull, fetch: FromStore) -> None:
        blob = pull.blobs[fetch.digest]
        if fetch.claim and not await self._acquire_claim(fetch.digest):
            pull.selection.on_claim_refused(fetch, time.monotonic())
            return
        log.debug("blob_from_store", blob=fetch.digest, claimed=fetch.claim)
        # Without a claim of its own: another peer may have one.
        async with self._renewing_claim(fetch.digest) if fetch.claim else contextlib.nullcontext():
            error = await self._store.fetch_one(blob, pull.traffic)
            await self._ignoring_outage(self._publish())  # before the claim expires
        if error is not None and fetch.claim:
            await self._ignoring_outage(self._directory.release_claim(fetch.digest))
        pull.selection.on_settled(fetch)
        await pull.on_settled(blob, error)

    async def _acquire_claim(self, digest: str) -> bool:
        try:
            return await self._directory.claim(digest)
        except BusUnavailable:
            return True

    @asynccontextmanager
    async def _renewing_claim(self, digest: str) -> AsyncIterator[None]:
        """Renew the claim during the transfer. It expires after it, when the others have refreshed their view."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(CLAIM_S / 3)
                await self._ignoring_outage(self._directory.renew_claim(digest))

        keeping = asyncio.create_task(keep(), name="peers-claim")
        try:
            yield
        finally:
            keeping.cancel()

    async def _publish(self) -> None:
        if self.url:
            await self._directory.publish(self.url, bitmaps_of(self._indexes, self._cache.verified))

    @staticmethod
    async def _ignoring_outage(call: Awaitable[None]) -> None:
        with contextlib.suppress(BusUnavailable):
            await call


class _Pull:
    """One pull in progress."""

    def __init__(
        self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled, selection: PeerSelection
    ) -> None:
        self.blobs = {blob.digest: blob for blob in blobs}
        self.traffic = traffic
        self.on_settled = on_settled
        self.selection = selection
        self.peers: dict[str, Peer] = {}
        self.changed = asyncio.Event()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


def _seed() -> int:
    return random.getrandbits(32)


def _record_failure(selection: PeerSelection, fetch: FromPeer, error: PeerFailed) -> None:
    now = time.monotonic()
    match error:
        case BlobNotHeld():
            selection.on_not_held(fetch)
        case DigestMismatch():
            selection.exclude(fetch, math.inf)
        case PeerUnreachable():
            selection.exclude(fetch, now + rules.UNREACHABLE_S)
        case PeerSlow():
            selection.back_off(fetch, now + rules.BACKOFF_SLOW_S)
        case PeerBusy():
            selection.back_off(fetch, now + rules.BACKOFF_BUSY_S)
        case _:
            selection.back_off(fetch, now + rules.BACKOFF_FAILED_S)
