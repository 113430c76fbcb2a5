"""Catalogues and the picker: who has what, and what to fetch next from whom."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout_worker.adapters.peer_address import peer_url
from shared.bus import HashSet, Renew
from shared.fakes import MemoryBus
from shared.names import WEIGHT_PEERS, weight_peer
from shared.weights.manifest import digest_of
from shared.weights.peers.catalogue import ALL, Catalogue, blobs, holdings
from shared.weights.peers.directory import CLAIM_S, Directory
from shared.weights.peers.picker import AT_STORE, PATIENCE_S, PER_PEER, FromPeer, FromStore, Move, Picker, Wait

DIGESTS = [digest_of(bytes([number])) for number in range(20)]


@given(st.lists(st.sampled_from(DIGESTS), unique=True), st.sets(st.sampled_from(DIGESTS)))
def test_marks_say_what_is_held(digests: list[str], held: set[str]) -> None:
    catalogue = Catalogue(digests)
    there, here = holdings([catalogue], held), Catalogue(digests)
    assert blobs([here], there) == held & set(digests)


def test_a_catalogue_that_differs_is_another_one() -> None:
    holds = holdings([Catalogue(DIGESTS)], set(DIGESTS))
    assert list(holds.values()) == [ALL]
    assert blobs([Catalogue(DIGESTS[::-1])], holds) == set()


@pytest.mark.parametrize("marks", ["", "?", "AAAA", "AA=", "A" * 1000, "\x00"])
def test_marks_that_make_no_sense_stand_for_nothing(marks: str) -> None:
    catalogue = Catalogue(DIGESTS[:7])
    assert blobs([catalogue], {catalogue.id: marks}) == set()


async def test_a_record_that_cannot_be_read_hides_only_its_own_peer() -> None:
    bus = MemoryBus()
    me, other = Directory(bus, "me", "here"), Directory(bus, "other", "there")
    await other.tell("http://10.0.0.2:8000", {"c": ALL})
    for name, record in {"odd": "{", "path": '{"name": "path", "url": "http://a/b?c", "host": "x"}'}.items():
        await bus.transact([HashSet(WEIGHT_PEERS, {name: ""}), Renew(weight_peer(name), record, 9.0)])
    assert [(peer.name, peer.holds) for peer in await me.look()] == [("other", {"c": ALL})]


async def test_a_loopback_address_is_of_use_on_its_own_machine_only() -> None:
    bus = MemoryBus()
    await Directory(bus, "a", "here").tell("http://127.0.0.1:8000", {})
    assert [peer.name for peer in await Directory(bus, "b", "here").look()] == ["a"]
    assert await Directory(bus, "c", "there").look() == []


async def test_a_peer_that_says_nothing_any_more_leaves_the_directory() -> None:
    now = [0.0]
    bus = MemoryBus(clock=lambda: now[0])
    await Directory(bus, "a", "here").tell("http://127.0.0.1:8000", {})
    now[0] = 60.0
    assert await Directory(bus, "b", "here").look() == []
    assert await bus.hash_all(WEIGHT_PEERS) == {}


def moves(picker: Picker, now: float = 0.0) -> list[Move]:
    found = []
    while not isinstance(move := picker.next(now), Wait):
        found.append(move)
    return found


def test_the_rarest_blob_comes_first_and_no_peer_is_asked_for_too_much() -> None:
    picker = Picker(DIGESTS, seed=1)
    common, rare = set(DIGESTS[:-1]), {DIGESTS[-1]}
    picker.see({"a": common, "b": common, "c": rare}, 0.0)
    found = moves(picker)
    assert found[0] == FromPeer(DIGESTS[-1], "c")
    assert sorted(move.peer for move in found if isinstance(move, FromPeer)) == [*"a" * PER_PEER, *"b" * PER_PEER, "c"]


def test_what_nobody_holds_is_claimed_from_the_store_beside_what_peers_have() -> None:
    picker = Picker(DIGESTS, seed=1)
    picker.see({"a": set(DIGESTS[:10])}, 0.0)
    found = [picker.next(0.0) for _ in range(AT_STORE + 1)]
    assert [type(move) for move in found] == [FromStore] * AT_STORE + [FromPeer]
    assert {move.digest for move in found[:AT_STORE] if isinstance(move, FromStore)} <= set(DIGESTS[10:])
    assert len(moves(picker)) == PER_PEER - 1


def test_who_is_alone_fetches_everything_from_the_store() -> None:
    assert {move.digest for move in moves(Picker(DIGESTS, seed=1)) if isinstance(move, FromStore)} == set(DIGESTS)


def test_two_pullers_begin_with_different_blobs() -> None:
    assert Picker(DIGESTS, seed=1).next(0.0) != Picker(DIGESTS, seed=3).next(0.0)


def test_a_claimed_blob_is_left_to_the_other_for_a_while() -> None:
    picker = Picker(DIGESTS[:1], seed=0)
    move = picker.next(0.0)
    assert move == FromStore(DIGESTS[0])
    picker.refused(move, 0.0)
    assert isinstance(picker.next(0.1), Wait)
    assert picker.next(CLAIM_S) == move


def test_whoever_waits_too_long_for_the_others_fetches_for_himself() -> None:
    picker = Picker(DIGESTS[:1], seed=0)
    now = 0.0
    while isinstance(move := picker.next(now), Wait) or (isinstance(move, FromStore) and move.claim):
        if isinstance(move, FromStore):
            picker.refused(move, now)
        now += 0.1
    assert now == pytest.approx(2 * PATIENCE_S, abs=2 * CLAIM_S)


def test_what_a_liar_holds_counts_for_nothing_even_in_the_next_pull() -> None:
    left: dict[str, float] = {}
    picker = Picker(DIGESTS[:2], seed=0, left=left)
    picker.see({"liar": set(DIGESTS[:2])}, 0.0)
    move = picker.next(0.0)
    assert isinstance(move, FromPeer)
    picker.leave(move, math.inf)
    assert all(isinstance(move, FromStore) for move in moves(picker))
    again = Picker(DIGESTS[2:], seed=0, left=left)
    again.see({"liar": set(DIGESTS[2:]), "other": {DIGESTS[2]}}, 0.0)
    assert {move.peer for move in moves(again, 1e9) if isinstance(move, FromPeer)} == {"other"}


def test_what_failed_on_its_way_from_one_peer_comes_from_another() -> None:
    picker = Picker(DIGESTS[:1], seed=0)
    holds = {"a": set(DIGESTS[:1]), "b": set(DIGESTS[:1])}
    picker.see(holds, 0.0)
    first = picker.next(0.0)
    picker.see(holds, 1.0)  # while it is under way
    assert isinstance(first, FromPeer)
    picker.rest(first, 9.0)
    assert picker.next(2.0) == FromPeer(DIGESTS[0], "b" if first.peer == "a" else "a")


def test_what_a_resting_peer_holds_is_waited_for() -> None:
    picker = Picker(DIGESTS[:1], seed=0)
    picker.see({"busy": set(DIGESTS[:1])}, 0.0)
    move = picker.next(0.0)
    assert isinstance(move, FromPeer)
    picker.rest(move, 1.0)
    assert isinstance(picker.next(0.5), Wait)
    assert picker.next(1.0) == move
    picker.rest(move, math.inf)
    assert isinstance(picker.next(1.0 + PATIENCE_S / 2), Wait)
    assert picker.next(1.0 + PATIENCE_S) == FromStore(DIGESTS[0])


@given(st.integers(0, 2**32), st.integers(1, 20), st.lists(st.sets(st.sampled_from(DIGESTS)), max_size=4))
def test_whatever_goes_wrong_every_blob_comes_once(seed: int, n_blobs: int, held: list[set[str]]) -> None:
    rng, wanted = random.Random(seed), DIGESTS[:n_blobs]
    picker, now, came, under_way = Picker(wanted, seed), 0.0, [], []
    for _ in range(5000):
        if picker.done:
            break
        now += rng.random()
        if rng.random() < 0.2:
            picker.see({f"peer-{number}": set(digests) for number, digests in enumerate(held)}, 0.0)
        move = picker.next(now)
        if isinstance(move, FromPeer | FromStore):
            under_way.append(move)
        elif under_way:
            move = under_way.pop(rng.randrange(len(under_way)))
            bad = rng.random() < 0.4
            if isinstance(move, FromStore) and move.claim and bad:
                picker.refused(move, now)
            elif isinstance(move, FromPeer) and bad:
                unlucky = [
                    picker.lacks,
                    picker.failed,
                    partial(picker.leave, until=now + 5),
                    partial(picker.rest, until=now + 5),
                ]
                rng.choice(unlucky)(move)
            else:
                picker.arrived(move)
                came.append(move.digest)
    assert picker.done
    assert sorted(came) == sorted(wanted)


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
def test_where_others_reach_a_worker(setting: str, host: str, url: str) -> None:
    assert peer_url(setting, host, 9000, "http://127.0.0.1:8700") == url


def test_without_a_way_to_the_manager_no_address_is_told() -> None:
    assert peer_url("", "0.0.0.0", 9000, "http://host.invalid:8700") == ""
