"""Which blob to fetch next, and from whom: peers first, the rarest blob first, the weight store last. Pure.

The order is that of BitTorrent (Cohen, 2003). What it lacks is a rule for what nobody holds yet: one peer claims such a
blob and fetches it from the store, and the others fetch something else meanwhile. So the store sends each blob about
once, however many pull.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.weights.peers.directory import CLAIM_S

PER_PEER = 4
"""Transfers from one peer at a time."""
AT_STORE = 2
"""Transfers from the store at a time while others want the same: what they fetched first is then shared first."""
PATIENCE_S = 15.0
"""How long a puller with nothing else to do waits for what resting peers hold, and then for what others claimed."""
LEFT_AWAY_S = 30.0
REST_BUSY_S = 0.5
REST_FAILED_S = 2.0
REST_SLOW_S = 5.0


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Fetch a blob from a peer."""

    digest: str
    peer: str


@dataclass(frozen=True, slots=True)
class FromStore:
    """Fetch a blob from the weight store, if it can be claimed; without asking, where others took too long."""

    digest: str
    claim: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do now."""


Move = FromPeer | FromStore | Wait


class Picker:
    """The blobs of one pull. Times are seconds of any clock."""

    def __init__(self, wanted: Sequence[str], seed: int, left: dict[str, float] | None = None) -> None:
        """Want these digests.

        Args:
            wanted: what is to come.
            seed: another one for each puller, so that they begin with different blobs.
            left: peer -> until when what it holds does not count; kept up to date, for the next pull.

        """
        self._rng = random.Random(seed)  # noqa: S311 - spreads load
        self._todo = dict.fromkeys(wanted)
        """Digests that are neither there nor on their way; a dict for its order."""
        self._under_way: set[str] = set()
        self._at_store = 0
        self._at_peer: Counter[str] = Counter()
        self._holds: dict[str, set[str]] = {}
        self._left = {} if left is None else left
        self._resting: dict[str, float] = {}
        """Peer -> until when it is not asked. What it holds counts: it is not fetched from the store for that."""
        self._claimed: dict[str, float] = {}
        """Digest -> until when it is left to the one that has claimed it."""
        self._rare: deque[str] = deque()
        self._unheld: deque[str] = deque()
        self._crowded = False
        self._idle_since = math.inf
        """When there was nothing to do for the first time since something arrived."""
        self.see({}, 0.0)

    @property
    def done(self) -> bool:
        """Tell whether every blob is there."""
        return not self._todo and not self._under_way

    def see(self, holds: Mapping[str, set[str]], now: float) -> None:
        """Take note of who holds what, of all that hold or want some of the blobs."""
        self._crowded = bool(holds)
        wanted = {*self._todo, *self._under_way}  # what is under way may fail, and is held by them still
        self._holds = {peer: held & wanted for peer, held in holds.items() if self._left.get(peer, 0.0) <= now}
        self._order()

    def _order(self) -> None:
        counts: Counter[str] = Counter()
        for held in self._holds.values():
            counts.update(held)
        mixed = list(self._todo)
        self._rng.shuffle(mixed)
        self._rare = deque(sorted((digest for digest in mixed if counts[digest]), key=counts.__getitem__))
        self._unheld = deque(digest for digest in mixed if not counts[digest])

    def next(self, now: float) -> Move:
        """Return what to do now. What is returned counts as under way."""
        if not self._todo:
            return Wait()
        move = self._move(now)
        if isinstance(move, Wait):
            self._idle_since = min(self._idle_since, now)
            return move
        del self._todo[move.digest]
        self._under_way.add(move.digest)
        if isinstance(move, FromPeer):
            self._at_peer[move.peer] += 1
        else:
            self._at_store += 1
        return move

    def _move(self, now: float) -> FromPeer | FromStore | Wait:
        at_store = AT_STORE if self._crowded else math.inf
        if self._at_store < at_store and (digest := self._claimable(now)):
            return FromStore(digest)
        if move := self._from_peer(now):
            return move
        idle_s = 0.0 if self._under_way else now - self._idle_since
        if idle_s >= 2 * PATIENCE_S:
            return FromStore(next(iter(self._todo)), claim=False)
        if idle_s >= PATIENCE_S and (digest := next((d for d in self._todo if self._claimed.get(d, 0.0) <= now), None)):
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
        free = {peer for peer in self._holds if self._at_peer[peer] < PER_PEER and self._resting.get(peer, 0.0) <= now}
        for _ in range(len(self._rare) if free else 0):
            digest = self._rare.popleft()
            if digest not in self._todo:
                continue
            peers = [peer for peer in free if digest in self._holds[peer]]
            if peers:
                return FromPeer(digest, min(peers, key=lambda peer: (self._at_peer[peer], self._rng.random())))
            self._rare.append(digest)
        return None

    # --- what became of a move ----------------------------------------------------------------------------------------

    def arrived(self, move: FromPeer | FromStore) -> None:
        """Say that a blob is there."""
        self._end(move)
        self._idle_since = math.inf

    def refused(self, move: FromStore, now: float) -> None:
        """Say that another peer has claimed the blob."""
        self._end(move)
        self._claimed[move.digest] = now + CLAIM_S / 2
        self._again(move.digest)

    def failed(self, move: FromPeer | FromStore) -> None:
        """Say that a blob did not come; it is wanted still."""
        self._end(move)
        self._again(move.digest)

    def lacks(self, move: FromPeer) -> None:
        """Say that a peer does not have the blob (any more)."""
        self._holds.get(move.peer, set()).discard(move.digest)
        self.failed(move)

    def rest(self, move: FromPeer, until: float) -> None:
        """Say that a blob did not come, and that the peer is to be asked later."""
        self._resting[move.peer] = max(until, self._resting.get(move.peer, 0.0))
        self.failed(move)

    def leave(self, move: FromPeer, until: float) -> None:
        """Say that a blob did not come, and that what the peer holds does not count until then."""
        self._left[move.peer] = until
        self._holds.pop(move.peer, None)
        self.failed(move)
        self._order()

    def _end(self, move: FromPeer | FromStore) -> None:
        self._under_way.remove(move.digest)
        if isinstance(move, FromPeer):
            self._at_peer[move.peer] -= 1
        else:
            self._at_store -= 1

    def _again(self, digest: str) -> None:
        self._todo[digest] = None
        held = any(digest in held for held in self._holds.values())
        (self._rare if held else self._unheld).append(digest)
