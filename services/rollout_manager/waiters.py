"""Clients that wait for the completions they have requested, while the manager's loop runs.

Consumes: new tokens in the ledger, announced by `notify` after each turn of the loop, and refusals.
Produces: chunks of completions, and which samples clients have received in full or abandoned.
Waits for: the next `notify`, in `follow`; a client that gets its completions whole is woken when one of them ends.
Ends when: all members of the group have ended, or with an error when no more tokens will come.

Waiters hold no tokens: what a client has not received is read from the ledger at the client's position. Tokens in the
ledger do not change, even when the world is rebuilt, so what a client has received stays valid.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlboost.services.rollout_manager.domain.effects import Deliver, Effect, Refuse
from rlboost.services.rollout_manager.domain.frames import TOKEN_BYTES
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.world import Clients, World
from rlboost.shared.errors import Rejected, Retryable
from rlboost.shared.ids import group_of
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_STOP,
    FinishReason,
    GroupRequested,
    SampleDropped,
    SampleFinished,
)
from rlboost.shared.process.stalls import Turnstile
from rlboost.shared.wire import I32, TOP, floats, ints

MAX_CHUNK_TOKENS = 128
"""A chunk is detokenized at once, which blocks the manager's loop."""
IDLE_S = 1.0
"""How often `follow` yields None while there is nothing new for a client that follows the tokens."""
WHOLE_IDLE_S = 30.0
"""How often it looks whether a request has expired whose client gets its completions whole: there may be thousands."""
EXPIRY_SLACK_S = 30.0
"""How long after its expiry a request fails that the loop has not ended, because Redis is unavailable."""


class CompletionUnavailable(Retryable):
    """The rest of a completion will not come, for a reason that is not the client's: request it again."""


class CompletionFailed(Rejected):
    """The completion cannot be generated: requesting it again will not help."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """The new tokens of one completion."""

    member: int
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    """Set in the last chunk."""
    spans: Sequence[tuple[str, int, int]]
    """(worker, weight version, number of tokens), in order, of the completion to the end of this chunk or further."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """(Token id, log-probability) of the most likely tokens at each position; empty if not requested."""

    @property
    def worker(self) -> str:
        """Return the worker that generated the newest tokens, empty if there are none."""
        return self.spans[-1][0] if self.spans else ""


@dataclass(slots=True, eq=False)
class Waiter:
    """One group that a client waits for."""

    request: GroupRequested
    resumable: bool
    """True if the client may reconnect and continue."""
    world: World
    open: dict[int, int]
    """Member whose end the client has not received -> number of its tokens that the client has received."""
    changed: asyncio.Event
    """Shared by the waiters of the client's request."""
    whole: bool = False
    """True if the client gets each completion when it has ended, False if it follows the tokens."""
    admitted: bool = False
    error: Exception | None = None
    """Why no more tokens will come."""
    delivered: SampleFinished | None = None
    """The end of a session's turn, which leaves the ledger with it."""

    def end(self, end: SampleFinished | SampleDropped) -> None:
        """Take the end of a session's turn."""
        if isinstance(end, SampleFinished):
            self.delivered = end
        else:
            self.error = CompletionFailed(end.reason)

    def sample(self, member: int) -> Sample | None:
        """Return a member's sample in the ledger."""
        return self.world.ledger.samples.get(self.request.group + member)

    def has_new(self, member: int) -> bool:
        """Return True if there is a part of a member that its client gets now."""
        if self.delivered is not None:
            return True
        if (sample := self.sample(member)) is None:
            return False
        return bool(sample.finish) or (sample.n_tokens > self.open[member] and not self.whole)


class CompletionWaiters:
    """All waiting clients of one manager."""

    def __init__(self) -> None:
        self.clients = Clients()
        self._waiters: dict[int, Waiter] = {}
        self._turnstile = Turnstile()

    @property
    def n_samples(self) -> int:
        """Return the number of samples that clients wait for, other than turns of sessions."""
        return sum(len(waiter.open) for waiter in self._waiters.values() if not waiter.request.session)

    def register(
        self, groups: Sequence[GroupRequested], world: World, *, resumable: bool, whole: bool = False
    ) -> list[Waiter]:
        """Wait for groups that are requested next, or were requested before; replaces earlier waiters.

        Args:
            groups: of one client's request, in the order of its prompts.
            world: the manager's.
            resumable: whether the client may reconnect and continue.
            whole: whether the client gets each completion when it has ended.

        """
        waiters: list[Waiter] = []
        changed = asyncio.Event()
        for request in groups:
            if previous := self._waiters.pop(request.group, None):
                previous.error = CompletionUnavailable("the same request was sent again, which receives the response")
                previous.changed.set()
            waiter = Waiter(request, resumable, world, dict.fromkeys(range(request.n), 0), changed, whole)
            waiters.append(waiter)
            self._waiters[request.group] = waiter
            self.clients.attended.add(request.group)
            self.clients.gone.pop(request.group, None)
        return waiters

    def complete(self, waiters: Sequence[Waiter], index: int, member: int) -> None:
        """Record that the client has received all it needs of a member.

        A client of a resumable request may reconnect, and then needs all completions: they end together, with the last.

        Args:
            waiters: the waiters of its request.
            index: of the member's waiter.
            member: its number.

        """
        waiter = waiters[index]
        del waiter.open[member]
        if waiter.request.session:
            return  # it is delivered to the trainer, whatever its agent needs
        if not waiter.resumable:
            self.clients.satisfied.add(waiter.request.group + member)
        elif not any(one.open for one in waiters):
            groups = [one.request for one in waiters]
            self.clients.satisfied.update(group.group + i for group in groups for i in range(group.n))

    def unregister(self, waiter: Waiter) -> None:
        """Remove a waiter; samples that the client has not received are dropped unless it may reconnect."""
        group = waiter.request.group
        if self._waiters.get(group) is not waiter:
            return
        del self._waiters[group]
        self.clients.attended.discard(group)
        if waiter.open and not waiter.resumable:
            self.clients.gone[group] = waiter.request

    async def follow(self, waiters: Sequence[Waiter]) -> AsyncGenerator[tuple[int, CompletionChunk] | None]:
        """Yield (index of the waiter, new chunk) until all members have ended.

        None follows after `IDLE_S` without one, or `WHOLE_IDLE_S` for a client that gets its completions whole.

        Args:
            waiters: the waiters of one request.

        Raises:
            CompletionUnavailable: no more tokens will come: request the completion again.
            CompletionFailed: it cannot be generated.

        """
        changed, idle_s = waiters[0].changed, WHOLE_IDLE_S if waiters[0].whole else IDLE_S
        # The turn of a session does not expire.
        limit = max(waiter.request.expires_at or math.inf for waiter in waiters) + EXPIRY_SLACK_S
        while any(waiter.open for waiter in waiters):
            changed.clear()
            new = [(i, member) for i, waiter in enumerate(waiters) for member in waiter.open if waiter.has_new(member)]
            for i, member in new:
                await self._turnstile.enter()
                if chunk := next_chunk(waiters[i], member):
                    yield i, chunk
                    if member in waiters[i].open and chunk.finish:
                        self.complete(waiters, i, member)
            if new:
                continue
            if error := next((waiter.error for waiter in waiters if waiter.open and waiter.error), None):
                raise error
            if time.time() > limit:
                raise CompletionUnavailable("the request has expired, and Redis is unavailable")
            try:
                async with asyncio.timeout(idle_s):
                    await changed.wait()
            except TimeoutError:
                yield None

    # --- called by the manager's loop ---

    def notify(self, world: World, wall: float) -> None:
        """Wake the clients for which the last turn has produced something; `wall` is the time in Unix seconds."""
        for waiter in list(self._waiters.values()):
            waiter.world = world
            samples = [sample for member in waiter.open if (sample := waiter.sample(member))]
            waiter.admitted = waiter.admitted or bool(samples)
            is_in_ledger = waiter.delivered is None
            if waiter.admitted:
                if is_in_ledger and len(samples) < len(waiter.open):
                    waiter.error = waiter.error or CompletionUnavailable("the request was ended by the manager")
            elif is_in_ledger and world.jobs.get_active(waiter.request.job_id) is None:
                waiter.error = CompletionFailed(f"job {waiter.request.job_id} has ended")
            if waiter.error or any(map(waiter.has_new, waiter.open)):
                waiter.changed.set()
            if waiter.error:
                self.unregister(waiter)
        # Samples that are no longer in the ledger were ended by this turn.
        ledger = world.ledger
        self.clients.satisfied = {sample for sample in self.clients.satisfied if sample in ledger.samples}
        # A group that is not admitted yet stays: its request may still be unread.
        self.clients.gone = {
            group: request
            for group, request in self.clients.gone.items()
            if group in ledger.open_in_group or (wall < request.expires_at and not world.is_known(request))
        }

    def end(self, effects: Iterable[Effect]) -> None:
        """Report to clients the samples that were refused, and turns of sessions that were delivered or dropped."""
        for effect in effects:
            match effect:
                case Refuse(sample, reason, is_retryable):
                    if waiter := self._waiters.get(group_of(sample)):
                        waiter.error = CompletionUnavailable(reason) if is_retryable else CompletionFailed(reason)
                case Deliver(_, (SampleFinished() | SampleDropped()) as end):
                    if waiter := self._waiters.get(end.sample):
                        waiter.end(end)
                case _:
                    pass

    def close(self, reason: str) -> None:
        """End all requests with an error."""
        for waiter in self._waiters.values():
            waiter.error = CompletionUnavailable(reason)
            waiter.changed.set()
        self._waiters.clear()
        self.clients = Clients()


def next_chunk(waiter: Waiter, member: int) -> CompletionChunk | None:
    """Return tokens of a member that the client has not received, and count them as received; None if none."""
    sample, n_received = waiter.sample(member), waiter.open[member]
    if waiter.delivered is not None:
        chunk = chunk_of(waiter.delivered, n_received)
        waiter.open[member] += len(chunk.tokens)
        return chunk
    if sample is None or not waiter.has_new(member):
        return None
    part = slice(n_received * TOKEN_BYTES, (n_received + MAX_CHUNK_TOKENS) * TOKEN_BYTES)
    tokens, logprobs = ints(bytes(sample.tokens[part]), I32), floats(bytes(sample.logprobs[part]))
    waiter.open[member] = n_received + len(tokens)
    finish = _finish(sample) if waiter.open[member] == sample.n_tokens else None
    top = _top_logprobs(sample, n_received, len(tokens))
    return CompletionChunk(member, tokens, logprobs, finish, sample.spans, top)


def chunk_of(turn: SampleFinished, n_received: int = 0) -> CompletionChunk:
    """Return the next part of a finished turn of a session."""
    part = slice(n_received * TOKEN_BYTES, (n_received + MAX_CHUNK_TOKENS) * TOKEN_BYTES)
    finish = turn.finish if part.stop >= len(turn.tokens) else None
    return CompletionChunk(0, ints(turn.tokens[part]), floats(turn.logprobs[part]), finish, turn.spans)


def _top_logprobs(sample: Sample, start: int, n: int) -> list[list[tuple[int, float]]]:
    if not (n_bytes := sample.top_bytes):
        return []
    found = np.frombuffer(bytes(sample.top_logprobs[start * n_bytes : (start + n) * n_bytes]), TOP)
    entries: Any = found.reshape(n, -1).tolist()
    return list[list[tuple[int, float]]](entries)


def _finish(sample: Sample) -> Literal["stop", "length"] | None:
    if sample.finish == FINISH_NONE:
        return None
    return "stop" if sample.finish == FINISH_STOP else "length"
