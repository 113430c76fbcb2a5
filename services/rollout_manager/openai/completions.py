"""Completion requests as groups for the fleet, and their tokens as response bodies.

Consumes: parsed requests, and the chunks of their groups from `CompletionWaiters`.
Produces: one `GroupRequested` a prompt, response bodies or server-sent events, and saved conversation turns.
Waits for: the next chunk, in `CompletionWaiters.follow`, which the manager's loop wakes.
Ends when: all completions of the request have ended, a client disconnects, or no more tokens will come.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.completion_waiters import (
    IDLE_S,
    CompletionChunk,
    CompletionFailed,
    CompletionUnavailable,
    Waiter,
)
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.openai.conversations import Conversations, Turn
from rlboost.services.rollout_manager.openai.errors import error_object, openai_problem
from rlboost.services.rollout_manager.openai.schemas import (
    ChatBody,
    Choice,
    CompletionBody,
    Delta,
    ResponseFormatter,
)
from rlboost.services.rollout_manager.openai.served_model import ServedModel
from rlboost.shared.errors import BusUnavailable, Fenced
from rlboost.shared.http.problem import Problem
from rlboost.shared.ids import MAX_REQUESTS, request_group
from rlboost.shared.messages import GroupRequested, Sampling
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append
from rlboost.shared.wire.columns import I32, pack

MAX_SAMPLES_IN_FLIGHT = 1024
"""Samples of clients in flight, of all jobs; beyond it, requests are rejected with 429."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One client's request, with its prompts as tokens."""

    body: CompletionBody | ChatBody
    job: Job
    model: ServedModel
    prompts: list[list[int]]
    max_tokens: int
    idempotency_key: str | None = None
    """With a key, the client may disconnect and request the same completion again."""
    turn: Turn | None = None
    """The turn of a conversation."""

    def validate(self) -> None:
        """Reject what cannot be generated.

        Raises:
            Problem: 400, naming the field.

        """
        param = "prompt" if isinstance(self.body, CompletionBody) else "messages"
        for i, prompt in enumerate(self.prompts):
            if found := _invalid_prompt(prompt, self.model):
                title, detail = found
                where = f"prompt {i}: " if len(self.prompts) > 1 else ""
                raise openai_problem(400, title, where + detail, param=param)
        if (n_samples := len(self.prompts) * self.body.n) > MAX_SAMPLES_IN_FLIGHT:
            detail = f"{n_samples} completions in one request: at most {MAX_SAMPLES_IN_FLIGHT} are possible"
            raise openai_problem(400, "Too many completions", detail, param=param)
        if self.body.stops and not self.model.has_tokenizer:
            detail = "the manager has no tokenizer of this model, which stop strings need: give stop_token_ids"
            raise openai_problem(400, "Invalid stop", detail, param="stop")


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request whose group has been requested from the fleet."""

    waiters: list[Waiter]
    """One for each prompt."""
    response: ResponseFormatter
    choices: list[Choice]
    """The choices of the first prompt, then those of the next."""
    turn: Turn | None
    deltas: list[Delta] = field(default_factory=list)
    """All deltas so far of a conversation's turn."""

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all choices so far."""
        return sum(choice.n_tokens for choice in self.choices)


class CompletionService:
    """Requests groups from the fleet and turns their tokens into responses."""

    def __init__(self, manager: Manager, conversations: Conversations, limit_s: float) -> None:
        """Serve completions by this manager's fleet, each within `limit_s`."""
        self._manager, self._conversations, self._limit_s = manager, conversations, limit_s

    async def start(self, request: CompletionRequest) -> InFlightRequest:
        """Request the completions from the fleet.

        Raises:
            Problem: the request is invalid, conflicts with another one, or cannot be accepted now.

        """
        request.validate()
        body, model = request.body, request.model
        if not model.has_tokenizer:
            body = body.model_copy(update={"return_token_ids": True})  # there is no text to return
        groups = [self._group(request, i) for i in range(len(request.prompts))]
        waiters = await self._register(groups, resumable=request.idempotency_key is not None)
        of_choice = [prompt for prompt in request.prompts for _ in range(body.n)]
        choices = [Choice(i, model, prompt, body) for i, prompt in enumerate(of_choice)]
        response = ResponseFormatter(body, groups[0].group, request.job.id, request.prompts)
        return InFlightRequest(waiters, response, choices, request.turn)

    async def collect(
        self, in_flight: InFlightRequest, is_disconnected: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any] | None:
        """Return the whole response; None if the client has disconnected.

        Raises:
            Problem: the completions will not come.

        """
        collected: dict[int, Delta] = {}
        checked_at = time.monotonic()
        try:
            async with aclosing(self._deltas(in_flight)) as deltas:
                async for delta in deltas:
                    if delta is not None:
                        earlier = collected.get(delta.index)
                        collected[delta.index] = earlier.merged(delta) if earlier else delta
                    if time.monotonic() - checked_at > IDLE_S:
                        checked_at = time.monotonic()
                        if await is_disconnected():
                            return None
        except (CompletionUnavailable, CompletionFailed) as error:
            raise _problem_of(error) from error
        return in_flight.response.response([collected[i] for i in sorted(collected)], in_flight.n_tokens)

    async def stream(self, in_flight: InFlightRequest) -> AsyncGenerator[str]:
        """Yield the response as server-sent events; an error is the last event."""
        started: set[int] = set()
        try:
            async with aclosing(self._deltas(in_flight)) as deltas:
                async for delta in deltas:
                    if delta is None:
                        yield ": keep-alive\n\n"
                        continue
                    yield _event(in_flight.response.chunk(delta, first=delta.index not in started))
                    started.add(delta.index)
        except (CompletionUnavailable, CompletionFailed) as error:
            yield _event({"error": error_object(_problem_of(error))})
            return
        if usage := in_flight.response.usage_chunk(in_flight.n_tokens):
            yield _event(usage)
        yield "data: [DONE]\n\n"

    def _group(self, request: CompletionRequest, index: int) -> GroupRequested:
        """Return the group of one of the request's prompts."""
        body, job, key = request.body, request.job, request.idempotency_key
        number = secrets.randbelow(MAX_REQUESTS) if key is None else _hashed(f"{index}/{key}") % MAX_REQUESTS
        group = request_group(job.no, number)
        seed = number if body.seed is None else body.seed
        stop_token_ids = () if body.ignore_eos else request.model.files.stop_token_ids
        return GroupRequested(
            job_id=job.id,
            group=group,
            n=body.n,
            prompt=pack(request.prompts[index], I32),
            sampling=Sampling(
                temperature=body.temperature,
                top_p=body.top_p,
                max_tokens=request.max_tokens,
                stop_token_ids=tuple(sorted({*stop_token_ids, *body.stop_token_ids})),
            ),
            version=self._manager.world.committed_version(job.id),
            # A sample is drawn by the sum of this and its id: the same seed gives the same tokens under any id.
            seed=(_hashed(str(seed)) - group) & 0x7FFF_FFFF_FFFF_FFFF,
            expires_at=time.time() + self._limit_s,
            preferred_worker=request.turn.preferred_worker if request.turn else "",
            vocab_size=request.model.files.vocab_size or 0,
        )

    async def _register(self, groups: Sequence[GroupRequested], *, resumable: bool) -> list[Waiter]:
        """Register waiters and request the groups that no earlier try has requested."""
        manager, waiters = self._manager, self._manager.completion_waiters
        registered, new = [], []
        for group in groups:
            known = manager.world.ledger.samples.get(group.group)
            if known is None:
                if manager.world.is_known(group):
                    raise openai_problem(409, "Just ended", "an earlier try has just ended: try again")
                new.append(group)
            elif not _is_same(known.request, group):
                detail = "another request with this Idempotency-Key is in flight: use a new key"
                raise openai_problem(409, "Key in use", detail)
            registered.append(known.request if known else group)
        if new and waiters.n_samples + sum(group.n for group in new) > MAX_SAMPLES_IN_FLIGHT:
            detail = f"{waiters.n_samples} completions of at most {MAX_SAMPLES_IN_FLIGHT} are in flight: try again"
            raise openai_problem(429, "Too many requests", detail, headers={"Retry-After": "1"})
        ours = waiters.register(registered, manager.world, resumable=resumable)
        try:
            if new:
                await manager.write([Append(names.rollouts_requested(group.job_id), group) for group in new])
        except (Fenced, BusUnavailable) as error:
            for waiter in ours:
                waiters.unregister(waiter)
            raise openai_problem(503, "Unavailable", f"{error}: try again", headers={"Retry-After": "1"}) from error
        return ours

    async def _deltas(self, in_flight: InFlightRequest) -> AsyncGenerator[Delta | None]:
        waiters = self._manager.completion_waiters
        try:
            async with aclosing(waiters.follow(in_flight.waiters)) as chunks:
                async for found in chunks:
                    yield None if found is None else await self._delta(in_flight, *found)
        finally:
            for waiter in in_flight.waiters:
                waiters.unregister(waiter)

    async def _delta(self, in_flight: InFlightRequest, prompt: int, chunk: CompletionChunk) -> Delta:
        waiter = in_flight.waiters[prompt]
        delta = in_flight.choices[prompt * waiter.request.n + chunk.member].add(chunk)
        if in_flight.turn is not None:
            in_flight.deltas.append(delta)
            if delta.finish:
                await self._save_turn(in_flight, in_flight.turn, chunk.worker)
        if delta.finish and not chunk.finish:  # it ended at a stop string
            self._manager.completion_waiters.complete(waiter, chunk.member)
        return delta

    async def _save_turn(self, in_flight: InFlightRequest, turn: Turn, worker: str) -> None:
        """Store a turn before the client receives its end, so that the next turn finds it."""
        text = "".join(delta.text for delta in in_flight.deltas)
        completion = [token for delta in in_flight.deltas for token in delta.tokens]
        try:
            await self._conversations.save(turn, text, completion, worker)
        except (Fenced, BusUnavailable) as error:
            raise CompletionUnavailable(f"the conversation could not be stored: {error}") from error


def _invalid_prompt(prompt: Sequence[int], model: ServedModel) -> tuple[str, str] | None:
    """Return title and text of the error about a prompt that the model does not take; None if it takes it."""
    files = model.files
    if not prompt:
        return "Invalid prompt", "the prompt has no tokens"
    if files.max_len is not None and len(prompt) >= files.max_len:
        detail = f"a prompt of {len(prompt)} tokens leaves none for a completion: the model takes {files.max_len}"
        return "Context length exceeded", detail
    if files.vocab_size is not None and max(prompt) >= files.vocab_size:
        return "Invalid prompt", f"token id {max(prompt)} is outside the model's 0..{files.vocab_size - 1}"
    return None


def _problem_of(error: CompletionUnavailable | CompletionFailed) -> Problem:
    if isinstance(error, CompletionFailed):
        return openai_problem(
            400, "Cannot be generated", f"{error}: change the request, or its model if the job has ended"
        )
    return openai_problem(503, "Unavailable", f"{error}: try again", headers={"Retry-After": "1"})


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _is_same(one: GroupRequested, other: GroupRequested) -> bool:
    return (one.n, one.prompt, one.sampling, one.seed) == (other.n, other.prompt, other.sampling, other.seed)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
