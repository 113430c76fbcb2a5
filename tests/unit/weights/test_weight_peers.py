"""Blob indexes, the peer directory and peer selection."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rlboost.services.rollout_worker.adapters.machine import listen_address, peer_url
from rlboost.shared.errors import NotFound
from rlboost.shared.streams.bus import HashSet, Renew
from rlboost.shared.streams.names import WEIGHT_PEERS, weight_claim, weight_peer
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from rlboost.shared.weights.peers import directory, selection, source
from rlboost.shared.weights.peers.directory import CLAIM_S, Peer, PeerDirectory
from rlboost.shared.weights.peers.selection import (
    ALL,
    MAX_CLAIMED_S,
    MAX_FROM_STORE,
    MAX_IDLE_S,
    MAX_PER_PEER,
    BlobIndex,
    Decision,
    FromPeer,
    FromStore,
    PeerSelection,
    Wait,
    bitmaps_of,
    blobs_in,
)
from rlboost.shared.weights.peers.source import PeerSource
from rlboost.shared.weights.puller import Traffic
from rlboost.shared.weights.transfer import Buffers, Download
from tests.support.eventually import LIMIT_S
from tests.support.memory_bus import MemoryBus

Watch = Callable[[Download], None]
DIGESTS = [digest_of(bytes([number])) for number in range(20)]


@given(st.lists(st.sampled_from(DIGESTS), unique=True), st.sets(st.sampled_from(DIGESTS)))
def test_bitmap_round_trip_returns_the_held_blobs(digests: list[str], held: set[str]) -> None:
    index = BlobIndex(digests)
    there, here = bitmaps_of([index], held), BlobIndex(digests)
    assert blobs_in([here], there) == held & set(digests)


def test_blob_index_in_another_order_has_another_id() -> None:
    holds = bitmaps_of([BlobIndex(DIGESTS)], set(DIGESTS))
    assert list(holds.values()) == [ALL]
    assert blobs_in([BlobIndex(DIGESTS[::-1])], holds) == set()


@pytest.mark.parametrize("bitmap", ["", "?", "AAAA", "AA=", "A" * 1000, "\x00"])
def test_invalid_bitmap_counts_as_none(bitmap: str) -> None:
    index = BlobIndex(DIGESTS[:7])
    assert blobs_in([index], {index.id: bitmap}) == set()


async def test_invalid_record_hides_only_its_own_peer() -> None:
    bus = MemoryBus()
    me, other = PeerDirectory(bus, "me", "here"), PeerDirectory(bus, "other", "there")
    await other.publish("http://10.0.0.2:8000", {"c": ALL})
    await bus.transact([HashSet(WEIGHT_PEERS, {"other": ""})])
    records = {
        "odd": "{",
        "path": '{"name": "path", "url": "http://a/b?c", "host": "x"}',
        "address": '{"name": "address", "url": "http://[x", "host": "x"}',
        "port": '{"name": "port", "url": "http://a:b", "host": "x"}',
        "user": '{"name": "user", "url": "http://u@a", "host": "x"}',
        "spoof": '{"name": "other", "url": "http://a", "host": "x"}',
    }
    for name, record in records.items():
        await bus.transact([HashSet(WEIGHT_PEERS, {name: ""}), Renew(weight_peer(name), record, 9.0)])
    assert [(peer.name, peer.holds) for peer in await me.peers()] == [("other", {"c": ALL})]


async def test_loopback_peer_is_visible_on_its_own_machine_only() -> None:
    bus = MemoryBus()
    await bus.transact([HashSet(WEIGHT_PEERS, {"a": ""})])
    await PeerDirectory(bus, "a", "here").publish("http://127.0.0.1:8000", {})
    assert [peer.name for peer in await PeerDirectory(bus, "b", "here").peers()] == ["a"]
    assert await PeerDirectory(bus, "c", "there").peers() == []


async def test_peer_with_an_expired_lease_leaves_the_directory() -> None:
    now = [0.0]
    bus = MemoryBus(clock=lambda: now[0])
    await PeerDirectory(bus, "a", "here").publish("http://127.0.0.1:8000", {})
    await bus.transact([HashSet(WEIGHT_PEERS, {"a": ""})])
    assert len(await PeerDirectory(bus, "b", "here").peers()) == 1
    now[0] = 60.0
    assert await PeerDirectory(bus, "b", "here").peers() == []


def moves(selection: PeerSelection, now: float = 0.0) -> list[Decision]:
    found: list[Decision] = []
    while not isinstance(fetch := selection.next(now), Wait):
        found.append(fetch)
    return found


def test_rarest_blob_comes_first_with_a_limit_per_peer() -> None:
    selection = PeerSelection(DIGESTS, seed=1)
    common, rare = set(DIGESTS[:-1]), {DIGESTS[-1]}
    selection.update({"a": common, "b": common, "c": rare}, 0.0)
    found = moves(selection)
    assert found[0] == FromPeer(DIGESTS[-1], "c")
    assert sorted(fetch.peer for fetch in found if isinstance(fetch, FromPeer)) == [
        *"a" * MAX_PER_PEER,
        *"b" * MAX_PER_PEER,
        "c",
    ]


def test_unheld_blobs_are_claimed_from_the_store_during_peer_fetches() -> None:
    selection = PeerSelection(DIGESTS, seed=1)
    selection.update({"a": set(DIGESTS[:10])}, 0.0)
    found = [selection.next(0.0) for _ in range(MAX_FROM_STORE + 1)]
    assert [type(fetch) for fetch in found] == [FromStore] * MAX_FROM_STORE + [FromPeer]
    assert {fetch.digest for fetch in found[:MAX_FROM_STORE] if isinstance(fetch, FromStore)} <= set(DIGESTS[10:])
    assert len(moves(selection)) == MAX_PER_PEER - 1


def test_puller_without_peers_fetches_everything_from_the_store() -> None:
    assert {fetch.digest for fetch in moves(PeerSelection(DIGESTS, seed=1)) if isinstance(fetch, FromStore)} == set(
        DIGESTS
    )


def test_two_pullers_begin_with_different_blobs() -> None:
    assert PeerSelection(DIGESTS, seed=1).next(0.0) != PeerSelection(DIGESTS, seed=3).next(0.0)


def test_a_claimed_blob_is_left_to_the_other_for_a_while() -> None:
    selection = PeerSelection(DIGESTS[:1], seed=0)
    fetch = selection.next(0.0)
    assert fetch == FromStore(DIGESTS[0])
    selection.on_claim_refused(fetch, 0.0)
    assert isinstance(selection.next(0.1), Wait)
    assert selection.next(CLAIM_S) == fetch


def test_puller_idle_for_too_long_fetches_without_a_claim() -> None:
    selection = PeerSelection(DIGESTS[:1], seed=0)
    now = 0.0
    while isinstance(fetch := selection.next(now), Wait) or (isinstance(fetch, FromStore) and fetch.claim):
        if isinstance(fetch, FromStore):
            selection.on_claim_refused(fetch, now)
        now += 0.1
    assert now == pytest.approx(2 * MAX_IDLE_S, abs=2 * CLAIM_S)


def test_claim_of_a_site_that_never_ends_costs_minutes() -> None:
    """A worker may write a claim without an end."""
    selection = PeerSelection(DIGESTS[:2], seed=0)
    now, fetched = 0.0, []
    while not selection.is_done and now < 2 * MAX_CLAIMED_S:
        fetch = selection.next(now)
        if isinstance(fetch, FromStore) and fetch.claim:
            selection.on_claim_refused(fetch, now, is_waited_for=True)
        elif isinstance(fetch, FromStore):
            selection.on_settled(fetch)
            fetched.append(fetch.digest)
        now += 0.5
    assert sorted(fetched) == sorted(DIGESTS[:2])
    assert now > MAX_CLAIMED_S


class StoreWithout:
    """A weight store that has no blob."""

    async def fetch_one(self, blob: ChunkRef, traffic: Traffic, watch: Watch) -> Exception | None:
        return NotFound(f"no {blob.digest}")


async def fetched(directory: PeerDirectory, blob: ChunkRef, folder: Path, store: StoreWithout) -> None:
    """Fetch a blob that no peer has."""

    async def on_settled(blob: ChunkRef, error: Exception | None) -> None:
        assert str(error) == f"no {blob.digest}"

    with closing(Cache(folder)) as cache:
        transport = cast("Any", None)
        source = PeerSource(directory, transport, cast("Any", store), cache, concurrency=1, store_only_bytes=0)
        await source.fetch([blob], Traffic(), on_settled)


class ContestedDirectory(PeerDirectory):
    """Another worker of the site fetches the blob for longer than a puller waits idly, and then gives up."""

    n_refused = 0

    async def claim(self, digest: str) -> bool:
        if is_ours := await super().claim(digest):
            return is_ours
        self.n_refused += 1
        if self.n_refused == 4:
            await self.release_claim(digest)
        return False


async def test_worker_of_a_site_waits_while_another_fetches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies of those that had waited for long enough would make a slow link slower for all."""
    monkeypatch.setattr(selection, "MAX_IDLE_S", 0.01)
    monkeypatch.setattr(selection, "CLAIM_S", 0.01)
    bus, blob = MemoryBus(), ChunkRef(digest_of(b"x"), 1)
    assert await PeerDirectory(bus, "another", "there", "far").claim(blob.digest)
    directory = ContestedDirectory(bus, "us", "here", "far")
    with capture_logs() as logs:
        await fetched(directory, blob, tmp_path, StoreWithout())
    assert [line["claimed"] for line in logs if line["event"] == "blob_from_store"] == [True]


async def test_claim_ends_while_no_byte_of_the_blob_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selection, "MAX_IDLE_S", 0.2)
    monkeypatch.setattr(directory, "CLAIM_S", 0.2)
    monkeypatch.setattr(source, "CLAIM_S", 0.2)
    bus, blob = MemoryBus(), ChunkRef(digest_of(b"x"), 1)
    another = PeerDirectory(bus, "another", "there", "far")

    class Stalled(StoreWithout):
        async def fetch_one(self, blob: ChunkRef, traffic: Traffic, watch: Watch) -> Exception | None:
            watch(Download(blob, Buffers()))
            while not await another.claim(blob.digest):  # noqa: ASYNC110 - a lease ends without an event
                await asyncio.sleep(0.05)
            return await super().fetch_one(blob, traffic, watch)

    async with asyncio.timeout(LIMIT_S):
        await fetched(PeerDirectory(bus, "us", "here", "far"), blob, tmp_path, Stalled())


def test_speed_of_a_transfer_within_a_machine_says_nothing_about_the_site(tmp_path: Path) -> None:
    me, blob = PeerDirectory(MemoryBus(), "me", "here", "far"), ChunkRef(digest_of(b"x"), 4 << 20)
    same, other = (Peer(name=host, url="http://10.0.0.2:8000", host=host, site="far") for host in ("here", "there"))
    with closing(Cache(tmp_path)) as cache:
        pulls = PeerSource(me, cast("Any", None), cast("Any", None), cache, concurrency=1)
    assert not pulls._is_elsewhere(same, blob, 0.001)
    assert not pulls._is_elsewhere(other, blob, 1.5), "a busy network of 1 Gb/s"


async def test_claim_of_another_peer_outlives_a_fetch_without_a_claim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlboost.shared.weights.peers.selection.MAX_IDLE_S", 0.01)
    bus, blob, settled = MemoryBus(), ChunkRef(digest_of(b"x"), 1), list[str]()
    assert await PeerDirectory(bus, "another", "here").claim(blob.digest)

    async def on_settled(blob: ChunkRef, error: Exception | None) -> None:
        settled.append(str(error))

    with closing(Cache(tmp_path)) as cache:
        directory, store = PeerDirectory(bus, "us", "here"), cast("Any", StoreWithout())
        transport = cast("Any", None)  # no peer has the blob
        source = PeerSource(directory, transport, store, cache, concurrency=1, store_only_bytes=0)
        await source.fetch([blob], Traffic(), on_settled)
    assert settled == [f"no {blob.digest}"]
    assert await bus.lease_values([weight_claim(blob.digest)]) == ["another"]


def test_excluded_peer_is_ignored_even_in_the_next_pull() -> None:
    excluded: dict[str, float] = {}
    selection = PeerSelection(DIGESTS[:2], seed=0, excluded=excluded)
    selection.update({"excluded-peer": set(DIGESTS[:2])}, 0.0)
    fetch = selection.next(0.0)
    assert isinstance(fetch, FromPeer)
    selection.exclude(fetch, math.inf)
    assert all(isinstance(fetch, FromStore) for fetch in moves(selection))
    again = PeerSelection(DIGESTS[2:], seed=0, excluded=excluded)
    again.update({"excluded-peer": set(DIGESTS[2:]), "other": {DIGESTS[2]}}, 0.0)
    assert {fetch.peer for fetch in moves(again, 1e9) if isinstance(fetch, FromPeer)} == {"other"}


def test_blob_that_failed_at_one_peer_is_fetched_from_another() -> None:
    selection = PeerSelection(DIGESTS[:1], seed=0)
    holds = {"a": set(DIGESTS[:1]), "b": set(DIGESTS[:1])}
    selection.update(holds, 0.0)
    first = selection.next(0.0)
    selection.update(holds, 1.0)  # while it is under way
    assert isinstance(first, FromPeer)
    selection.back_off(first, 9.0)
    assert selection.next(2.0) == FromPeer(DIGESTS[0], "b" if first.peer == "a" else "a")


def test_blobs_of_a_peer_in_backoff_are_waited_for() -> None:
    selection = PeerSelection(DIGESTS[:1], seed=0)
    selection.update({"busy": set(DIGESTS[:1])}, 0.0)
    fetch = selection.next(0.0)
    assert isinstance(fetch, FromPeer)
    selection.back_off(fetch, 1.0)
    assert isinstance(selection.next(0.5), Wait)
    assert selection.next(1.0) == fetch
    selection.back_off(fetch, math.inf)
    assert isinstance(selection.next(1.0 + MAX_IDLE_S / 2), Wait)
    assert selection.next(1.0 + MAX_IDLE_S) == FromStore(DIGESTS[0])


@given(st.integers(0, 2**32), st.integers(1, 20), st.lists(st.sets(st.sampled_from(DIGESTS)), max_size=4))
def test_every_blob_arrives_once_despite_failures(seed: int, n_blobs: int, held: list[set[str]]) -> None:
    rng, wanted = random.Random(seed), DIGESTS[:n_blobs]
    selection, now, arrived, in_flight = PeerSelection(wanted, seed), 0.0, [], []
    for _ in range(5000):
        if selection.is_done:
            break
        now += rng.random()
        if rng.random() < 0.2:
            selection.update({f"peer-{number}": set(digests) for number, digests in enumerate(held)}, 0.0)
        fetch = selection.next(now)
        if isinstance(fetch, FromPeer | FromStore):
            in_flight.append(fetch)
        elif in_flight:
            fetch = in_flight.pop(rng.randrange(len(in_flight)))
            bad = rng.random() < 0.4
            if isinstance(fetch, FromStore) and fetch.claim and bad:
                selection.on_claim_refused(fetch, now)
            elif isinstance(fetch, FromPeer) and bad:
                unlucky: list[Callable[[FromPeer], object]] = [
                    selection.on_not_held,
                    selection.on_failed,
                    partial(selection.exclude, until=now + 5),
                    partial(selection.back_off, until=now + 5),
                ]
                rng.choice(unlucky)(fetch)
            else:
                selection.on_settled(fetch)
                arrived.append(fetch.digest)
    assert selection.is_done
    assert sorted(arrived) == sorted(wanted)


@pytest.mark.parametrize(
    ("setting", "host", "url"),
    [
        ("", "127.0.0.1", "http://127.0.0.1:9000"),
        ("", "::1", "http://[::1]:9000"),
        ("", "0.0.0.0", "http://127.0.0.1:9000"),
        ("off", "127.0.0.1", ""),
        ("https://worker-7.example:443/", "127.0.0.1", "https://worker-7.example:443"),
    ],
)
def test_peer_url_by_setting_and_host(setting: str, host: str, url: str) -> None:
    assert peer_url(setting, host, 9000, "http://127.0.0.1:8700") == url


def test_peer_url_without_a_route_to_the_manager_is_empty() -> None:
    assert peer_url("", "0.0.0.0", 9000, "http://host.invalid:8700") == ""


@pytest.mark.parametrize(
    ("setting", "manager_url", "address"),
    [
        ("10.1.2.3", "http://127.0.0.1:8700", "10.1.2.3"),
        ("", "http://127.0.0.1:8700", "127.0.0.1"),
        ("", "http://localhost:8700", "127.0.0.1"),
        ("", "http://host.invalid:8700", "127.0.0.1"),
    ],
)
def test_listen_address_is_the_one_toward_the_manager(setting: str, manager_url: str, address: str) -> None:
    assert listen_address(setting, manager_url) == address
