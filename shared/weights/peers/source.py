"""Fetch blobs from peers first and the weight store last, so that the store's egress does not grow with the fleet.

Peers are untrusted: every blob is digest-checked, and a peer that sent other bytes is never asked again. Without Redis
everything comes from the store.

Workers with a site are far from the store, and share a link to it that is slower than those between them. They ask only
each other, and one of them fetches each blob from the store, however small a pull is.

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
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog

from rlboost.shared.errors import BusUnavailable, Corrupt
from rlboost.shared.http.access import sign
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.proxies import direct
from rlboost.shared.secrets import bearer
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.peers import selection as rules
from rlboost.shared.weights.peers.directory import CLAIM_S, LEASE_S, Peer, PeerDirectory
from rlboost.shared.weights.peers.selection import (
    BlobIndex,
    FromPeer,
    FromStore,
    PeerSelection,
    Wait,
    bitmaps_of,
    blobs_in,
)
from rlboost.shared.weights.puller import OnSettled, StoreSource, Traffic
from rlboost.shared.weights.transfer import (
    BadStatus,
    BlobDownloader,
    Buffers,
    Download,
    DownloadFailed,
    TransferTimedOut,
    Unreachable,
)

log = structlog.get_logger(__name__)

# --- Fetch a blob from a peer over HTTP, with one error type for each way in which a peer can fail --------------------
# The URLs of peers come from Redis, so no peer is sent a credential: each request carries a proof that is valid for one
# blob.


BUSY_STATUS = 503
_CONNECT_S = 2.0
_STALL_S = 5.0
"""Maximum time without a byte."""
_SLOWEST_BYTES_PER_S = 256 << 10
"""A slower peer is not worth waiting for."""
_LIMIT_S = 15.0
"""Maximum time of a transfer, without that of its bytes at `_SLOWEST_BYTES_PER_S`."""
_FAIR_S = 3.0
"""How long a transfer may take before its speed is checked."""
_SLOW = 1 / 8
"""A transfer below this fraction of the median speed is slow."""
_MAX_SPEEDS = 32


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


def is_behind(n_bytes: int, n_received: int, took_s: float) -> bool:
    """Return True if a transfer from a peer is so slow that the blob is fetched from the weight store meanwhile."""
    return took_s >= _FAIR_S and n_received < n_bytes * took_s / (_LIMIT_S + n_bytes / _SLOWEST_BYTES_PER_S)


class PeerTransport:
    """Connections to peers."""

    def __init__(self, peer_key: str) -> None:
        """Connect lazily; see `shared.http.access.peer_key`."""
        self._peer_key = peer_key
        self._downloader = BlobDownloader(connect_s=_CONNECT_S, stall_s=_STALL_S, follow_redirects=False, route=direct)
        self._speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)
        """Bytes/s of the last completed transfers."""

    async def close(self) -> None:
        """Release connections."""
        self._downloader.close()

    async def fetch(self, url: str, download: Download, keep: Callable[[], bool]) -> bool:
        """Fetch a whole blob, call `keep`, which checks its digest, in the thread that received it; return its result.

        Raises:
            PeerFailed: or a subclass; `download` has the bytes received so far.

        """
        began, digest = time.monotonic(), download.blob.digest

        def check_speed() -> None:
            took = time.monotonic() - began
            if took > _FAIR_S and download.n_bytes < took * self._fair_speed():
                raise PeerSlow(f"{download.n_bytes / took:.0f} bytes/s")

        def received() -> bool:
            self._speeds.append(download.n_bytes / max(time.monotonic() - began, 1e-6))
            return keep()

        limit_s = _LIMIT_S + download.blob.n_bytes / _SLOWEST_BYTES_PER_S
        proof = bearer("the proof of a chunk", sign(self._peer_key, "chunk", digest))
        try:
            return await self._downloader.download(
                f"{url}/v1/chunks/{digest}", proof, download, check_speed, keep=received, limit_s=limit_s
            )
        except Corrupt as error:
            raise DigestMismatch(str(error)) from error
        except Unreachable as error:
            raise PeerUnreachable(str(error)) from error
        except TransferTimedOut as error:
            raise PeerSlow(str(error)) from error
        except DownloadFailed as error:
            raise PeerFailed(str(error)) from error
        except BadStatus as error:
            raise _error(error.status, digest) from error

    def _fair_speed(self) -> float:
        speeds = tuple(self._speeds)
        return _SLOW * statistics.median(speeds) if speeds else 0.0


def _error(status: int, digest: str) -> PeerFailed:
    match status:
        case 404:
            return BlobNotHeld(digest)
        case _ if status == BUSY_STATUS:
            return PeerBusy(digest)
        case 401:
            return PeerUnreachable(
                "it refuses the proof of the peer key: it is of another system, or has another version of rlboost"
            )
        case _:
            return PeerUnreachable(f"status {status}")


# --- The source -------------------------------------------------------------------------------------------------------


_CHECK_EVERY_S = 0.5
"""How often the speed of a transfer from a peer is checked."""
STORE_ONLY_BYTES = 32 << 20
"""A smaller pull of a worker without a site uses the store alone: it ends before peers could learn what others hold."""
_ELSEWHERE_S = 1.0
"""A transfer from a worker of the same site takes longer only if one of the two is not there, or is busy."""


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
        self._store_only_bytes = 0 if directory.site else store_only_bytes
        self._speeds: deque[tuple[str, float]] = deque(maxlen=2 * _MAX_SPEEDS)
        """Peer of another machine, or empty for the store, and bytes/s of the last transfers."""
        self._buffers = Buffers()
        self._indexes: tuple[BlobIndex, ...] = ()
        self._excluded: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        """Peer -> how often it was slow or failed since it last sent a blob."""
        self.url = ""
        """URL under which other peers reach this one; empty if it serves none."""

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        self._indexes = tuple(indexes)

    async def has_chunks_at_hand(self) -> bool:
        return False

    async def announce(self, stop: asyncio.Event) -> None:
        """Renew this peer's directory entry until the stop, then withdraw it."""
        while not await until_stop(stop, LEASE_S / 3):
            await self._ignoring_outage(self._publish())
        if self.url:
            await self._ignoring_outage(self._directory.withdraw())

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
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
            # The link of a site may be cut, while its workers reach each other.
            peers = list(pull.peers.values()) if self._directory.site else []
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
        download, began = Download(pull.blobs[fetch.digest], self._buffers), time.monotonic()
        transfer = asyncio.create_task(self._receive(peer, download), name="peers-transfer")
        try:
            if await _is_behind(transfer, download) and await self._settled_by_store(pull, fetch, peer, transfer):
                return
            await transfer
        except PeerFailed as error:
            if not isinstance(error, PeerSlow):  # a thread may still use its buffer
                download.release()
            self._record_failure(pull.selection, fetch, error)
            if not isinstance(error, PeerBusy):
                log.warning("peer_failed", peer=peer.name, url=peer.url, kind=type(error).__name__, error=str(error))
        else:
            download.release()
            if self._is_elsewhere(peer, download.blob, time.monotonic() - began):
                log.warning("peer_not_of_site", peer=peer.name, url=peer.url, site=peer.site)
                self._ignore(pull.selection, peer.name)
            else:
                del self._failures[peer.name]
            pull.selection.on_settled(fetch)
            await pull.on_settled(download.blob, None)
        finally:
            await _cancelled(transfer)
            pull.traffic.from_peers += download.n_received

    def _is_elsewhere(self, peer: Peer, blob: ChunkRef, took_s: float) -> bool:
        """Return True if a peer of this site is so much slower than another, or than the store, that its label lies."""
        if peer.host != self._directory.host:  # within a machine, transfers are faster than any network
            self._speeds.append((peer.name, blob.n_bytes / max(took_s, 1e-6)))
        if not peer.site or took_s < _ELSEWHERE_S:
            return False
        speeds = defaultdict[str, list[float]](list)
        for source, speed in self._speeds:
            speeds[source].append(speed)
        return blob.n_bytes / took_s < _SLOW * max(map(statistics.median, speeds.values()), default=0.0)

    async def _receive(self, peer: Peer, download: Download) -> None:
        keep = partial(self._cache.store, download.blob, download.data)
        if not await self._transport.fetch(peer.url, download, keep):
            raise DigestMismatch(f"blob {download.blob.digest} came with another digest")

    async def _settled_by_store(self, pull: _Pull, fetch: FromPeer, peer: Peer, transfer: asyncio.Task[None]) -> bool:
        """Fetch a blob from the weight store too; return False if the peer sends it first, or fails first."""
        log.warning("peer_slow", peer=peer.name, url=peer.url, blob=fetch.digest)
        self._ignore(pull.selection, fetch.peer)
        blob = pull.blobs[fetch.digest]
        other = asyncio.create_task(self._store.fetch_one(blob, pull.traffic), name="peers-store")
        try:
            await asyncio.wait({transfer, other}, return_when=asyncio.FIRST_COMPLETED)
            if transfer.done() and (transfer.exception() is None or not other.done()):
                return False
            error = await other
        finally:
            await _cancelled(other)
        pull.selection.on_settled(fetch)
        await pull.on_settled(blob, error)
        return True

    def _record_failure(self, selection: PeerSelection, fetch: FromPeer, error: PeerFailed) -> None:
        now = time.monotonic()
        match error:
            case BlobNotHeld():
                selection.on_not_held(fetch)
            case DigestMismatch():
                selection.exclude(fetch, math.inf)
            case PeerUnreachable():
                selection.exclude(fetch, now + rules.UNREACHABLE_S)
            case PeerBusy():
                selection.back_off(fetch, now + rules.BACKOFF_BUSY_S)
            case _ if isinstance(error, PeerSlow) or self._failures[fetch.peer]:
                selection.on_failed(fetch)
                self._ignore(selection, fetch.peer)
            case _:  # the first time, as it may have been restarted
                self._failures[fetch.peer] += 1
                selection.back_off(fetch, now + rules.BACKOFF_FAILED_S)

    def _ignore(self, selection: PeerSelection, peer: str) -> None:
        """Ignore a peer for longer each time; once for all its transfers in progress."""
        now = time.monotonic()
        if self._excluded.get(peer, 0.0) <= now:
            self._failures[peer] += 1
            selection.ignore(peer, now + rules.ignored_s(self._failures[peer]))

    async def _from_store(self, pull: _Pull, fetch: FromStore) -> None:
        blob = pull.blobs[fetch.digest]
        if fetch.claim and not await self._acquire_claim(pull.selection, fetch):
            return
        log.debug("blob_from_store", blob=fetch.digest, claimed=fetch.claim)
        downloads: list[Download] = []
        # Without a claim of its own: another peer may have one.
        async with self._renewing_claim(fetch.digest, downloads) if fetch.claim else contextlib.nullcontext():
            began = time.monotonic()
            error = await self._store.fetch_one(blob, pull.traffic, downloads.append)
            if error is None:
                self._speeds.append(("", blob.n_bytes / max(time.monotonic() - began, 1e-6)))
            await self._ignoring_outage(self._publish())  # before the claim expires
        if error is not None and fetch.claim:
            await self._ignoring_outage(self._directory.release_claim(fetch.digest))
        pull.selection.on_settled(fetch)
        await pull.on_settled(blob, error)

    async def _acquire_claim(self, selection: PeerSelection, fetch: FromStore) -> bool:
        is_of_site = bool(self._directory.site)
        try:
            if await self._directory.claim(fetch.digest):
                return True
            # A second copy would slow down the link of a site, on which the first is under way.
            selection.on_claim_refused(fetch, time.monotonic(), is_waited_for=is_of_site)
        except BusUnavailable:
            if not is_of_site:
                return True
            # Where the link of a site is cut, another of its workers may be fetching the blob.
            selection.on_claim_refused(fetch, time.monotonic())
        return False

    @asynccontextmanager
    async def _renewing_claim(self, digest: str, downloads: Sequence[Download]) -> AsyncIterator[None]:
        """Renew the claim during the transfer, unless no byte comes for `MAX_IDLE_S`.

        It expires after the transfer, when the others have refreshed their view.
        """

        async def keep() -> None:
            n_received, since = 0, time.monotonic()
            while True:
                await asyncio.sleep(CLAIM_S / 3)
                n_before, n_received = n_received, sum(download.n_received for download in downloads)
                if n_received > n_before:
                    since = time.monotonic()
                if time.monotonic() - since < rules.MAX_IDLE_S:
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


async def _is_behind(transfer: asyncio.Task[None], download: Download) -> bool:
    """Wait until a transfer ends or is too slow; return True in the second case."""
    began = time.monotonic()
    while not (await asyncio.wait({transfer}, timeout=_CHECK_EVERY_S))[0]:
        if is_behind(download.blob.n_bytes, download.n_bytes, time.monotonic() - began):
            return True
    return False


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; its outcome is known or not needed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
