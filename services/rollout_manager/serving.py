"""The desk: where clients wait for the samples that they have asked for, while the manager's loop turns.

Nothing is kept here that could be lost: what a client has not got yet is in the ledger, which is read from where the
client stands. Tokens in the ledger stay, also when the world is rebuilt, so what was handed out is never taken back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Literal

from services.rollout_manager.domain.actions import Action, Refuse
from services.rollout_manager.domain.ledger import TOKEN_BYTES, Sample
from services.rollout_manager.domain.serving import Clients
from services.rollout_manager.domain.world import World
from shared.columns import I32, floats, ints
from shared.errors import Conflict, Retryable
from shared.ids import group_of
from shared.messages import FINISH_NONE, FINISH_STOP, FinishReason, GroupRequested

QUIET_S = 1.0
"""How often a client is looked after for which there is nothing new."""
LATE_S = 30.0
"""How long after its limit a request is waited for that the loop has not ended, since Redis is away."""


class Unserved(Retryable):
    """The rest of a request will not come, for a reason that is not the client's."""


class Unservable(Conflict):
    """The request cannot be generated: asking again will not help."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one completion."""

    member: int
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    """Set with the last piece."""
    worker: str
    """Who made the last of the tokens."""


@dataclass(slots=True)
class Place:
    """Where one client waits for one group."""

    request: GroupRequested
    returns: bool
    """Whether the client could come back for it."""
    world: World
    open: dict[int, int]
    """Member whose end the client has not got -> tokens of it that the client has."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = False
    seen: int = -1
    over: Exception | None = None
    """Why nothing more will come."""

    def sample(self, member: int) -> Sample | None:
        """Return the member as the ledger has it."""
        return self.world.ledger.samples.get(self.request.group + member)


class Desk:
    """All clients of one manager."""

    def __init__(self) -> None:
        """Open with nobody there."""
        self.clients = Clients()
        self._places: dict[int, Place] = {}

    @property
    def waiting(self) -> int:
        """Return how many samples clients wait for."""
        return sum(len(place.open) for place in self._places.values())

    def sit(self, request: GroupRequested, world: World, *, returns: bool) -> Place:
        """Wait for a group: one that will be asked for, or one that a client left; then whoever waits there must go."""
        if before := self._places.pop(request.group, None):
            before.over = Unserved("the same request came again: its answer goes there")
            before.bell.set()
        place = Place(request, returns, world, dict.fromkeys(range(request.n), 0))
        self._places[request.group] = place
        self.clients.attended.add(request.group)
        self.clients.gone.discard(request.group)
        return place

    def content(self, place: Place, member: int) -> None:
        """Note that the client has all that it wants of a member."""
        del place.open[member]
        if not place.returns:
            self.clients.content.add(place.request.group + member)
        elif not place.open:  # one that comes back needs all members: they end together
            self.clients.content.update(place.request.group + i for i in range(place.request.n))

    def leave(self, place: Place) -> None:
        """Let a client go. What it has not got is given up, unless it could come back."""
        group = place.request.group
        if self._places.get(group) is not place:
            return
        del self._places[group]
        self.clients.attended.discard(group)
        if place.open and not place.returns:
            self.clients.gone.add(group)

    async def follow(self, place: Place) -> AsyncGenerator[Piece | None]:
        """Yield what is new, up to the end of all members; None when nothing is for a while.

        Raises:
            Unserved: the rest will not come: ask again.
            Unservable: it cannot be generated.

        """
        limit = place.request.expires_at + LATE_S
        while place.open:
            place.bell.clear()
            found = [piece for member in list(place.open) if (piece := new_piece(place, member))]
            for piece in found:
                yield piece
                if piece.member in place.open and piece.finish:
                    self.content(place, piece.member)
            if found:
                continue
            if place.over is not None:
                raise place.over
            if time.time() > limit:
                raise Unserved("out of time, and Redis is away")
            try:
                async with asyncio.timeout(QUIET_S):
                    await place.bell.wait()
            except TimeoutError:
                yield None

    # --- what the manager's loop tells ---

    def ring(self, world: World) -> None:
        """Wake the clients for which the last turn has brought something."""
        for place in list(self._places.values()):
            place.world = world
            samples = [sample for member in place.open if (sample := place.sample(member))]
            seen = sum(sample.n_tokens + (sample.finish != FINISH_NONE) for sample in samples)
            place.admitted = place.admitted or bool(samples)
            if place.admitted and len(samples) < len(place.open):
                place.over = place.over or Unserved("it ended without a client")
            elif place.admitted:
                pass
            elif (job := world.jobs.get(place.request.job_id)) is None or job.ended:
                place.over = Unserved(f"job {place.request.job_id} has ended")
            if seen != place.seen or place.over:
                place.seen = seen
                place.bell.set()
            if place.over:  # whether or not anybody is there to hear it
                self.leave(place)
        # What is not in the ledger any more was ended by that turn.
        ledger = world.ledger
        self.clients.content = {sample for sample in self.clients.content if sample in ledger.samples}
        self.clients.gone = {group for group in self.clients.gone if group in ledger.open_in_group}

    def refuse(self, actions: Iterable[Action]) -> None:
        """Tell clients what will not come."""
        for action in actions:
            if isinstance(action, Refuse) and (place := self._places.get(group_of(action.sample))):
                failed = action.reason.startswith("failed")
                place.over = Unservable(action.reason) if failed else Unserved(action.reason)

    def close(self, why: str) -> None:
        """Send everybody away."""
        for place in self._places.values():
            place.over = Unserved(why)
            place.bell.set()
        self._places.clear()
        self.clients = Clients()


def new_piece(place: Place, member: int) -> Piece | None:
    """Return what the client has not got of a member yet, and count it as got; None where that is nothing."""
    sample, have = place.sample(member), place.open[member]
    if sample is None or (sample.n_tokens <= have and not sample.finish):
        return None
    start = have * TOKEN_BYTES
    tokens, logprobs = ints(bytes(sample.tokens[start:]), I32), floats(bytes(sample.logprobs[start:]))
    place.open[member] = have + len(tokens)
    worker = sample.stretches[-1][0] if sample.stretches else ""
    return Piece(member, tokens, logprobs, _finish(sample), worker)


def _finish(sample: Sample) -> Literal["stop", "length"] | None:
    if sample.finish == FINISH_NONE:
        return None
    return "stop" if sample.finish == FINISH_STOP else "length"
