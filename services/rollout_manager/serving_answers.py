"""From a request to its answer: a group for the fleet, and what comes of it as the client wants it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from services.rollout_manager.app import Manager
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.serving import QUIET_S, Piece, Place, Unservable, Unserved
from services.rollout_manager.serving_model import ServedModel
from services.rollout_manager.serving_sessions import Sessions, Turn
from services.rollout_manager.serving_shapes import Answer, AskedChat, AskedCompletion, Choice, Delta, problem
from shared import names
from shared.bus import Append
from shared.columns import I32, pack
from shared.errors import BusUnavailable, Fenced
from shared.http import Problem
from shared.ids import MAX_REQUESTS, request_group
from shared.messages import GroupRequested, Sampling

MAX_WAITING = 1024
"""Samples of clients in flight, of all jobs: beyond it a client is asked to come later."""
CLIENT_WENT = 499
"""The status of an answer that nobody reads."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants."""

    asked: AskedCompletion | AskedChat
    job: Job
    model: ServedModel
    prompt: list[int]
    max_tokens: int
    key: str | None = None
    """By which the client may come back."""
    turn: Turn | None = None
    """Of which conversation it is."""

    def check(self) -> None:
        """Refuse what cannot be generated.

        Raises:
            Problem: 400, naming the field.

        """
        model, prompt = self.model, self.prompt
        field = "prompt" if isinstance(self.asked, AskedCompletion) else "messages"
        if not prompt:
            raise problem(400, "Invalid prompt", "the prompt has no tokens", param=field)
        if model.max_len is not None and len(prompt) >= model.max_len:
            detail = f"{len(prompt)} tokens leave no room for a completion: the model takes {model.max_len} in all"
            raise problem(400, "Context length exceeded", detail, param=field)
        if model.vocabulary is not None and max(prompt) >= model.vocabulary:
            detail = f"token id {max(prompt)} is outside the model's 0..{model.vocabulary - 1}"
            raise problem(400, "Invalid prompt", detail, param=field)
        if self.asked.stops and model.tokenizer is None:
            detail = "the manager has no tokenizer of this model to find text with: give stop_token_ids"
            raise problem(400, "Invalid stop", detail, param="stop")


@dataclass(frozen=True, slots=True)
class _Order:
    """One request on its way."""

    place: Place
    answer: Answer
    choices: list[Choice]
    turn: Turn | None
    said: list[Delta] = field(default_factory=list)
    """Of a conversation's turn, all so far."""

    @property
    def n_tokens(self) -> int:
        return sum(choice.n_tokens for choice in self.choices)


class Completer:
    """Turns requests into groups, and what comes of these into answers."""

    def __init__(self, manager: Manager, sessions: Sessions, limit_s: float) -> None:
        """Serve what this manager's fleet makes; a request may take `limit_s`."""
        self._manager, self._sessions, self._limit_s = manager, sessions, limit_s

    async def answer(self, wanted: Wanted, request: Request) -> Response:
        """Have it generated and return the answer, or the beginning of a stream."""
        wanted.check()
        asked, model, prompt = wanted.asked, wanted.model, wanted.prompt
        if model.tokenizer is None:
            asked = asked.model_copy(update={"return_token_ids": True})  # there is no text to return
        group = self._group(wanted)
        place = await self._sit(group, returns=wanted.key is not None)
        choices = [Choice(model, prompt, asked) for _ in range(group.n)]
        order = _Order(place, Answer(asked, group.group, wanted.job.id, prompt), choices, wanted.turn)
        if asked.stream:
            return StreamingResponse(self._stream(order), media_type="text/event-stream")
        return await self._whole(order, request)

    def _group(self, wanted: Wanted) -> GroupRequested:
        asked, job, key = wanted.asked, wanted.job, wanted.key
        number = secrets.randbelow(MAX_REQUESTS) if key is None else _number(key) % MAX_REQUESTS
        group = request_group(job.no, number)
        seed = number if asked.seed is None else asked.seed
        ends = () if asked.ignore_eos else wanted.model.stop_token_ids
        return GroupRequested(
            job_id=job.id,
            group=group,
            n=asked.n,
            prompt=pack(wanted.prompt, I32),
            sampling=Sampling(
                temperature=asked.temperature,
                top_p=asked.top_p,
                max_tokens=wanted.max_tokens,
                stop_token_ids=tuple(sorted({*ends, *asked.stop_token_ids})),
            ),
            version=self._manager.world.committed[job.id],
            # A sample draws by the sum of this and its id: the same seed draws the same under any id.
            seed=(_number(str(seed)) - group) & 0x7FFF_FFFF_FFFF_FFFF,
            expires_at=time.time() + self._limit_s,
            near=wanted.turn.near if wanted.turn else "",
        )

    async def _sit(self, group: GroupRequested, *, returns: bool) -> Place:
        """Take a place at the desk and ask for the group, unless it is on its way since an earlier try."""
        manager = self._manager
        known = manager.world.ledger.samples.get(group.group)
        if known is not None:
            if _same(known.request, group):
                return manager.desk.sit(known.request, manager.world, returns=returns)
            raise problem(409, "Key in use", "another request with this Idempotency-Key is on its way: take a new one")
        if manager.world.is_known(group):
            raise problem(409, "Just ended", "an earlier try has ended this moment: ask again")
        if manager.desk.waiting + group.n > MAX_WAITING:
            detail = f"{manager.desk.waiting} completions are on their way, and {MAX_WAITING} is the most: try again"
            raise problem(429, "Too many requests", detail, headers={"Retry-After": "1"})
        place = manager.desk.sit(group, manager.world, returns=returns)
        try:
            await manager.write([Append(names.rollouts_requested(group.job_id), group)])
        except (Fenced, BusUnavailable) as error:
            manager.desk.leave(place)
            raise problem(503, "Unavailable", f"{error}: try again", headers={"Retry-After": "1"}) from error
        return place

    async def _deltas(self, order: _Order) -> AsyncGenerator[Delta | None]:
        desk, place = self._manager.desk, order.place
        try:
            async with aclosing(desk.follow(place)) as pieces:
                async for piece in pieces:
                    yield None if piece is None else await self._taken(order, piece)
        finally:
            desk.leave(place)

    async def _taken(self, order: _Order, piece: Piece) -> Delta:
        delta = order.choices[piece.member].take(piece)
        if order.turn is not None:
            order.said.append(delta)
            if delta.finish:
                await self._keep(order, piece.worker)
        if delta.finish and not piece.finish:
            self._manager.desk.content(order.place, piece.member)
        return delta

    async def _keep(self, order: _Order, worker: str) -> None:
        """Remember a turn before its end is told, so that the next one finds it."""
        assert order.turn is not None
        text = "".join(delta.text for delta in order.said)
        made = [token for delta in order.said for token in delta.tokens]
        try:
            await self._sessions.keep(order.turn, text, made, worker)
        except (Fenced, BusUnavailable) as error:
            raise Unserved(f"the conversation could not be kept: {error}") from error

    async def _whole(self, order: _Order, request: Request) -> Response:
        whole: dict[int, Delta] = {}
        looked_at = time.monotonic()
        try:
            async with aclosing(self._deltas(order)) as deltas:
                async for delta in deltas:
                    if delta is not None:
                        whole[delta.index] = whole[delta.index].joined(delta) if delta.index in whole else delta
                    if time.monotonic() - looked_at > QUIET_S:
                        looked_at = time.monotonic()
                        if await request.is_disconnected():
                            return Response(status_code=CLIENT_WENT)
        except (Unserved, Unservable) as error:
            raise _failed(error) from error
        return JSONResponse(order.answer.whole([whole[i] for i in sorted(whole)], order.n_tokens))

    async def _stream(self, order: _Order) -> AsyncGenerator[str]:
        begun: set[int] = set()
        try:
            async with aclosing(self._deltas(order)) as deltas:
                async for delta in deltas:
                    if delta is None:
                        yield ": still here\n\n"
                        continue
                    yield _event(order.answer.chunk(delta, first=delta.index not in begun))
                    begun.add(delta.index)
        except (Unserved, Unservable) as error:
            yield _event({"error": _failed(error).extra["error"]})
            return
        if last := order.answer.last(order.n_tokens):
            yield _event(last)
        yield "data: [DONE]\n\n"


def _failed(error: Unserved | Unservable) -> Problem:
    if isinstance(error, Unservable):
        return problem(400, "Cannot be generated", f"{error}: change the request")
    return problem(503, "Unavailable", f"{error}: ask again", headers={"Retry-After": "1"})


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _same(one: GroupRequested, other: GroupRequested) -> bool:
    return (one.n, one.prompt, one.sampling, one.seed) == (other.n, other.prompt, other.sampling, other.seed)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
