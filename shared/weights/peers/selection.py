"""Select the next blob to fetch and its source: peers first, the rarest blob first, the weight store last. Pure.

The order is that of BitTorrent (Cohen, 2003), with one rule added for blobs that no peer holds yet: one peer claims
such a blob and fetches it from the store while the others fetch other blobs. The store therefore sends each blob about
once, whatever the number of pullers.
"""

from __future__ import annotations

import base64
import binascii
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from rlboost.shared.weights.peers.directory import CLAIM_S

# --- A peer's holdings, encoded in one bit per blob -------------------------------------------------------------------
# A blob index is an ordered list of digests that every machine derives from the same document: the chunks of a manifest
# or the deltas of one hop. Its id is the digest of the list, so a bitmap describes which of its blobs a peer holds.


ALL = "*"
"""Stands for a bitmap of ones."""


class BlobIndex:
    """An ordered list of blobs."""

    def __init__(self, digests: Sequence[str]) -> None:
        """Index the digests in this order."""
        self.digests = tuple(digests)
        self.id = blake3("".join(self.digests).encode()).hexdigest()[:32]

    def encode_bitmap(self, held: AbstractSet[str]) -> str:
        """Return the held ones as text: a base64 bitmap, `ALL`, or an empty string for none."""
        bits = np.fromiter((digest in held for digest in self.digests), dtype=bool, count=len(self.digests))
        if not bits.any():
            return ""
        return ALL if bits.all() else base64.b64encode(np.packbits(bits).tobytes()).decode()

    def decode_bitmap(self, bitmap: str) -> Iterable[str]:
        """Invert `encode_bitmap`; an invalid bitmap counts as none."""
        if bitmap == ALL:
            return self.digests
        try:
            packed = np.frombuffer(base64.b64decode(bitmap, validate=True), dtype=np.uint8)
        except (binascii.Error, ValueError):
            return ()
        if len(packed) != -(-len(self.digests) // 8):
            return ()
        return (self.digests[index] for index in np.flatnonzero(np.unpackbits(packed, count=len(self.digests))))


def bitmaps_of(indexes: Iterable[BlobIndex], held: AbstractSet[str]) -> dict[str, str]:
    """Return index id -> bitmap. An index without held blobs is included: this peer pulls its blobs."""
    return {index.id: index.encode_bitmap(held) for index in indexes if index.digests}


def blobs_in(indexes: Iterable[BlobIndex], holds: Mapping[str, str]) -> set[str]:
    """Invert `bitmaps_of`, for the given indexes."""
    return {digest for index in indexes if index.id in holds for digest in index.decode_bitmap(holds[index.id])}


# --- Selection --------------------------------------------------------------------------------------------------------


MAX_PER_PEER = 4
"""Concurrent transfers from one peer."""
MAX_FROM_STORE = 2
"""Concurrent transfers from the store while other peers pull the same blobs: early blobs are shared early."""
MAX_IDLE_S = 15.0
"""How long an idle puller waits for peers in back-off, and after that for blobs that other peers claimed."""
MAX_CLAIMED_S = 120.0
"""How long a blob is left to the peers of a site that claim it and renew their claims: more than its transfer takes."""
UNREACHABLE_S = 30.0
BACKOFF_BUSY_S = 0.5
BACKOFF_FAILED_S = 2.0
BACKOFF_SLOW_S = 5.0
LONGEST_BACKOFF_S = 600.0


def ignored_s(n_failures: int) -> float:
    """Return for how long a peer's holdings are ignored after it was slow, or failed, this many times."""
    return min(LONGEST_BACKOFF_S, BACKOFF_SLOW_S * 4.0 ** (n_failures - 1))


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Fetch a blob from a peer."""

    digest: str
    peer: str


@dataclass(frozen=True, slots=True)
class FromStore:
    """Fetch a blob from the weight store: after claiming it, or without a claim if the claimant took too long."""

    digest: str
    claim: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be fetched now."""


Decision = FromPeer | FromStore | Wait


class PeerSelection:
    """The state of one pull's blobs. Times are seconds of any clock."""

    def __init__(self, needed: Sequence[str], seed: int, excluded: dict[str, float] | None = None) -> None:
        """Start with no peers.

        Args:
            needed: digests to fetch.
            seed: different for each puller, so that they start with different blobs.
            excluded: peer -> time until which its holdings are ignored; updated in place, for the next pull.

        """
        self._rng = random.Random(seed)  # noqa: S311 - spreads load
        self._todo = dict.fromkeys(needed)
        """Digests neither fetched nor in flight; a dict for its order."""
        self._in_flight: set[str] = set()
        self._at_store = 0
        self._at_peer: Counter[str] = Counter()
        self._holds: dict[str, set[str]] = {}
        self._excluded = {} if excluded is None else excluded
        self._backoff_until: dict[str, float] = {}
        """Peer -> time until which it is not asked. Its holdings still count: they are not fetched from the store."""
        self._claimed: dict[str, float] = {}
        """Digest -> time until which it is left to the peer that claimed it."""
        self._refused_at: dict[str, float] = {}
        """Digest -> when its claim was refused first."""
        self._by_rarity: deque[str] = deque()
        self._unheld: deque[str] = deque()
        self._has_peers = False
        self._idle_since = math.inf
        """When the puller first had nothing to fetch since the last blob arrived."""
        self._waits_for_peers = True
        """False once they have kept it idle for too long, until one of them sends a blob."""
        self.update({}, 0.0)

    @property
    def is_done(self) -> bool:
        """Return True if every blob has been fetched."""
        return not self._todo and not self._in_flight

    def update(self, holds: Mapping[str, set[str]], now: float) -> None:
        """Replace the holdings of the peers that hold or fetch some of the blobs."""
        self._has_peers = bool(holds)
        needed = {*self._todo, *self._in_flight}  # a blob in flight may fail and be needed again
        self._holds = {peer: held & needed for peer, held in holds.items() if self._excluded.get(peer, 0.0) <= now}
        self._order()

    def _order(self) -> None:
        counts: Counter[str] = Counter()
        for held in self._holds.values():
            counts.update(held)
        mixed = list(self._todo)
        self._rng.shuffle(mixed)
        self._by_rarity = deque(sorted((digest for digest in mixed if counts[digest]), key=counts.__getitem__))
        self._unheld = deque(digest for digest in mixed if not counts[digest])

    def next(self, now: float) -> Decision:
        """Return what to do now. A returned fetch counts as in flight."""
        if not self._todo:
            return Wait()
        decision = self._decide(now)
        if isinstance(decision, Wait):
            self._idle_since = min(self._idle_since, now)
            return decision
        del self._todo[decision.digest]
        self._in_flight.add(decision.digest)
        if isinstance(decision, FromPeer):
            self._at_peer[decision.peer] += 1
        else:
            self._at_store += 1
        return decision

    def _decide(self, now: float) -> Decision:
        limit = MAX_FROM_STORE if self._has_peers else math.inf
        if self._at_store < limit and (digest := self._claimable(now)):
            return FromStore(digest)
        if fetch := self._from_peer(now):
            return fetch
        idle_s = 0.0 if self._in_flight else now - self._idle_since
        if idle_s >= 2 * MAX_IDLE_S or not self._waits_for_peers:
            # They say that they are busy, or have claims that do not end: the other blobs need not wait as long.
            self._waits_for_peers = False
            return FromStore(next(iter(self._todo)), claim=False)
        if idle_s >= MAX_IDLE_S and (digest := next((d for d in self._todo if self._claimed.get(d, 0.0) <= now), None)):
            return FromStore(digest)
        return Wait()

    def _claimable(self, now: float) -> str | None:
        for _ in range(len(self._unheld)):
            digest = self._unheld.popleft()
            if digest not in self._todo:
                continue
            if self._claimed.get(digest, 0.0) <= now:
                return digest
            self._unheld.append(digest)
        return None

    def _from_peer(self, now: float) -> FromPeer | None:
        free = {
            peer
            for peer in self._holds
            if self._at_peer[peer] < MAX_PER_PEER and self._backoff_until.get(peer, 0.0) <= now
        }
        for _ in range(len(self._by_rarity) if free else 0):
            digest = self._by_rarity.popleft()
            if digest not in self._todo:
                continue
            peers = [peer for peer in free if digest in self._holds[peer]]
            if peers:
                return FromPeer(digest, min(peers, key=lambda peer: (self._at_peer[peer], self._rng.random())))
            self._by_rarity.append(digest)
        return None

    # --- results of a fetch ----------------------------------------------------------------------------------------

    def on_settled(self, fetch: FromPeer | FromStore) -> None:
        """Record that the blob needs no further fetch: it is in the cache, or cannot be obtained."""
        self._end(fetch)
        self._idle_since = math.inf
        self._waits_for_peers |= isinstance(fetch, FromPeer)

    def on_claim_refused(self, fetch: FromStore, now: float, *, is_waited_for: bool = False) -> None:
        """Record that another peer has claimed the blob; if `is_waited_for`, it is given `MAX_CLAIMED_S` for it."""
        self._end(fetch)
        if is_waited_for and now - self._refused_at.setdefault(fetch.digest, now) < MAX_CLAIMED_S:
            self._idle_since, self._waits_for_peers = math.inf, True
        self._claimed[fetch.digest] = now + CLAIM_S / 2
        self._requeue(fetch.digest)

    def on_failed(self, fetch: FromPeer | FromStore) -> None:
        """Record that the transfer failed; the blob is still needed."""
        self._end(fetch)
        self._requeue(fetch.digest)

    def on_not_held(self, fetch: FromPeer) -> None:
        """Record that the peer does not hold the blob (any more)."""
        self._holds.get(fetch.peer, set()).discard(fetch.digest)
        self.on_failed(fetch)

    def back_off(self, fetch: FromPeer, until: float) -> None:
        """Record that the transfer failed, and do not ask the peer until the given time."""
        self._backoff_until[fetch.peer] = max(until, self._backoff_until.get(fetch.peer, 0.0))
        self.on_failed(fetch)

    def exclude(self, fetch: FromPeer, until: float) -> None:
        """Record that the transfer failed, and ignore the peer's holdings until the given time."""
        self.on_failed(fetch)
        self.ignore(fetch.peer, until)

    def ignore(self, peer: str, until: float) -> None:
        """Ignore a peer's holdings until the given time."""
        self._excluded[peer] = until
        self._holds.pop(peer, None)
        self._order()

    def _end(self, fetch: FromPeer | FromStore) -> None:
        self._in_flight.remove(fetch.digest)
        if isinstance(fetch, FromPeer):
            self._at_peer[fetch.peer] -= 1
        else:
            self._at_store -= 1

    def _requeue(self, digest: str) -> None:
        self._todo[digest] = None
        held = any(digest in held for held in self._holds.values())
        (self._by_rarity if held else self._unheld).append(digest)
