"""Trainable sessions: each call of an agent is a turn of its sample, with the tokens of the turns that it continues.

A call continues the longest earlier turn whose messages and answer it begins with, and keeps their tokens as they were
generated. A call that continues none, such as that of a sub-agent or after the context was compacted, begins a branch.
A call that is repeated gets the same turn: if its client says that it tries again, if the connection broke before the
agent had the answer, or if the agent was started again, which then finds the turns of its earlier start.

Consumes: calls, and what Redis has of their session (`shared.job.agent`).
Produces: with each new turn, in one transaction, its request, a `TurnOpened` for the trainer, and the session's field.
Waits for: Redis, and the text processes.

Each turn is stored with what it adds to its parent's tokens. A manager remembers what it has read of a session, so that
a call costs no more in a long session than in a short one.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import TemplateOptions, TokenizationError
from rlboost.services.rollout_manager.serving.schemas import ChatBody, openai_problem, unavailable
from rlboost.services.rollout_manager.serving.text import MAX_READS, Message, ServedModel, digest_with, digests
from rlboost.services.rollout_manager.session_offers import check_leased
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.http.problem import Problem
from rlboost.shared.job.agent import LEASED, REWARDED, SESSION, SessionId, SessionRecord
from rlboost.shared.messages import GroupRequested, SampleDropped, SampleFinished, TurnOpened
from rlboost.shared.messages.codec import decode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, HashSet, Op
from rlboost.shared.wire import length

POLICY = "policy"
"""What an agent may call the model of its session."""
READ_AHEAD = 2
"""Turns after the last known one that are read with it; at least one, which tells that there are more."""
MAX_SESSIONS = 4096
"""Sessions whose turns a manager keeps once it has read them; a call of another one reads all its turns."""
MAX_BYTES = 256 << 20
"""Maximum size of what it remembers."""
TURN_BYTES = 4096
"""About the memory of a turn besides its tokens."""
MAX_REPEATS = 8
"""How often unmarked calls get a turn again: an agent may break its streams off on purpose."""
_ENDS = (names.session_finished, names.session_answer)


class _Opened(BaseModel):
    """A turn as its call asked for it."""

    model_config = ConfigDict(frozen=True)

    parent: int = 0
    """Id of the turn that it continues."""
    start: str
    """Which start of the agent has called for it last."""
    call: str
    """Digest of all that determines the answer."""
    key: str = ""
    """Digest of the `Idempotency-Key`; empty without one."""
    n_messages: int
    messages: str
    """Digest of its messages."""
    tokens: str
    """What follows the parent's prompt and completion in its prompt, an int32 column in hexadecimal."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Turn:
    """A turn of a session."""

    id: int
    opened: _Opened
    end: SampleFinished | SampleDropped | None = None
    answer: str | None = None
    """Digest of its messages and its answer, None before its agent has received it."""
    n_repeats: int = 0
    """How many calls got it after the one that opened it, as far as this manager knows."""

    @property
    def misses(self) -> list[str]:
        """Return the fields of the session that it may get."""
        if self.end is None:
            return [names.session_finished(self.id), names.session_answer(self.id)]
        return [names.session_answer(self.id)] if self.answer is None and isinstance(self.end, SampleFinished) else []

    def add(self, stored: Mapping[str, str | None]) -> None:
        """Add what is stored of it."""
        if self.end is None and (text := stored.get(names.session_finished(self.id))) is not None:
            self.end = _decoded(text)
        self.answer = self.answer or stored.get(names.session_answer(self.id))


@dataclass(slots=True)
class _Known:
    """What has been read of a session. Only the leader writes turns: what it has read once does not change."""

    world: World
    """Of the manager when it was read: it gets another one whenever it becomes the leader."""
    record: SessionRecord
    turns: dict[int, _Turn] = field(default_factory=dict)
    """Turn -> itself, in the order of their ids."""

    @property
    def missing(self) -> list[str]:
        """Return the fields that may be new, and one that only a session that was over has lost."""
        n = len(self.turns)
        ids = [self.record.turn_id(number) for number in range(n, min(n + READ_AHEAD, self.record.n_ids))]
        ahead = [of(turn) for turn in ids for of in (names.session_opened, *_ENDS)]
        return [
            SESSION,
            LEASED,
            REWARDED,
            self.last,
            *(name for turn in self.turns.values() for name in turn.misses),
            *ahead,
        ]

    @property
    def last(self) -> str:
        """Return the field of its last turn; it has one."""
        return names.session_opened(next(reversed(self.turns)))

    def add(self, stored: Mapping[str, str | None]) -> int:
        """Add what is stored; return the number of turns that are new."""
        n_before = len(self.turns)
        for number in range(n_before, self.record.n_ids):
            turn = self.record.turn_id(number)
            if (text := stored.get(names.session_opened(turn))) is None:
                break
            self.turns[turn] = _Turn(turn, _Opened.model_validate_json(text))
        for found in self.turns.values():
            if found.misses:
                found.add(stored)
        return len(self.turns) - n_before

    def prompt(self, turn: _Turn) -> bytes:
        """Return the prompt of a turn, a column of tokens."""
        parts = [bytes.fromhex(turn.opened.tokens)]
        while turn.opened.parent:
            turn = self.turns[turn.opened.parent]
            assert isinstance(turn.end, SampleFinished), "only an answered turn is continued"
            parts += [turn.end.tokens, bytes.fromhex(turn.opened.tokens)]
        return b"".join(reversed(parts))

    @property
    def n_bytes(self) -> int:
        """Return about how much memory it needs."""
        ends = [turn.end for turn in self.turns.values()]
        sizes = [2 * len(end.tokens) for end in ends if isinstance(end, SampleFinished)]
        return sum(sizes) + sum(len(turn.opened.tokens) + TURN_BYTES for turn in self.turns.values())


@dataclass(slots=True, eq=False)
class SessionTurn:
    """The turn that a call asks for."""

    request: GroupRequested
    messages: str
    """Digest of its messages."""
    ops: list[Op] = field(default_factory=list)
    """What opens it; empty if it is open."""
    end: SampleFinished | SampleDropped | None = None
    """Its end, if it has ended."""

    @property
    def redis_key(self) -> str:
        """Return the key of its session."""
        return names.session(self.request.job_id, self.request.session)


class Retry(NamedTuple):
    """How a client says that it repeats a call."""

    key: str
    """Digest of its `Idempotency-Key`; empty without one."""
    is_again: bool
    """Whether it says so without a key."""

    @classmethod
    def of(cls, idempotency_key: str | None, retry_count: str) -> Retry:
        """Return what the headers say."""
        return cls("" if idempotency_key is None else _digest(idempotency_key), retry_count != "0")


class Sessions:
    """The sessions of all agents."""

    def __init__(self, manager: Manager, bus: Bus) -> None:
        self._manager, self._bus = manager, bus
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reads = asyncio.Semaphore(MAX_READS)
        self._known: OrderedDict[str, tuple[_Known, int]] = OrderedDict()
        """Key of a session -> what is known of it, with its size; least recently used first."""
        self._n_bytes = 0

    def lock(self, session: SessionId) -> asyncio.Lock:
        """Return the lock under which a turn is found and opened: calls of one agent may be concurrent."""
        return self._locks.setdefault(session.redis_key, asyncio.Lock())

    def job_of(self, session: SessionId, model: str) -> Job:
        """Return the job of a session, which generates now.

        Raises:
            Problem: it cannot, or the call names another model.

        """
        job = self._manager.world.jobs.get(session.job_id)
        if job is None or job.record.ended:
            raise openai_problem(409, "Session over", f"the job {session.job_id} of this session has ended")
        if model not in (POLICY, job.id, job.record.spec.name):
            detail = f"this session's key is for the model {POLICY!r}, which is job {job.id}: use this name"
            raise openai_problem(404, "Model not found", detail, param="model")
        return job.record

    async def turn(
        self,
        session: SessionId,
        body: ChatBody,
        model: ServedModel,
        messages: list[Message],
        options: TemplateOptions,
        *,
        retry: Retry,
    ) -> SessionTurn:
        """Return the turn that a call asks for.

        Args:
            session: of the call's key.
            body: the call.
            model: of the session's job.
            messages: of the call, as the chat template takes them.
            options: of the chat template.
            retry: how the client says that it repeats a call.

        Raises:
            Problem: the session is over or at a limit, or cannot train on what the call asks for.
            TokenizationError: see `ServedModel`.

        """
        known = await self._read(session)
        record = known.record
        _check(body, record)
        found = await digests(messages, options)
        turns = list(known.turns.values())
        call = _digest([found[-1], body.requested_tokens, sorted(body.stop_token_ids)])
        # A turn that could not be generated is none: its call is tried anew.
        same = [turn for turn in turns if turn.opened.call == call and not isinstance(turn.end, SampleDropped)]
        ours = [turn for turn in turns if turn.opened.start == session.start]
        ids = {0, *(turn.id for turn in ours)}
        if before := next((turn for turn in same if turn not in ours and turn.opened.parent in ids), None):
            now = before.opened.model_copy(update={"start": session.start})
            self._forget(session.redis_key)
            return _asked(session, record, before, known.prompt(before), _opening(session, before.id, now))
        same = [turn for turn in same if turn.opened.start == session.start]
        if repeated := _repeated(same, retry, await self._lost(session, same)):
            repeated.n_repeats += 1
            return _asked(session, record, repeated, known.prompt(repeated))
        await self._check_limit(session, record, ours, len(turns))
        parent = _parent(ours, found)
        given = _whole(known, parent) if parent else b""
        try:
            tokens = await model.extend_chat(given, messages, parent.opened.n_messages, options) if parent else None
        except TokenizationError:
            tokens = None  # the template writes the answer anew: this is a branch, and no token is changed
        if tokens is None:
            tokens, parent, given = await model.encode_chat(messages, options), None, b""
        new = _Opened(
            parent=parent.id if parent else 0,
            start=session.start,
            call=call,
            key=retry.key,
            n_messages=len(messages),
            messages=found[-1],
            tokens=tokens[len(given) :].hex(),
            max_tokens=_max_tokens(body, record, model, length(tokens), _n_generated(ours)),
            stop_token_ids=tuple(sorted({*record.sampling.stop_token_ids, *body.stop_token_ids})),
        )
        turn = _Turn(record.turn_id(len(turns)), new)
        asked = _asked(session, record, turn, tokens, _opening(session, turn.id, new))
        asked.ops.append(Append(names.rollouts_requested(session.job_id), asked.request))
        return asked

    async def _lost(self, session: SessionId, turns: Sequence[_Turn]) -> list[_Turn]:
        """Return the turns that their agent has not received and no connection waits for, and thus asks for again."""
        attended = self._manager.completion_waiters.clients.attended
        lost = [turn for turn in turns if turn.answer is None and turn.id not in attended]
        lost = [turn for turn in lost if turn.n_repeats < MAX_REPEATS]
        if not lost:
            return lost
        # An answer is stored before its connection ends, but maybe after the session was read.
        fields = [names.session_answer(turn.id) for turn in lost]
        try:
            answers = await self._bus.hash_some(session.redis_key, fields)
        except BusUnavailable as error:
            raise unavailable(error) from error
        return [turn for turn, answer in zip(lost, answers, strict=True) if answer is None]

    async def _check_limit(self, session: SessionId, record: SessionRecord, own: Sequence[_Turn], n_all: int) -> None:
        """Refuse a call beyond the limits of one start, and record that it was."""
        detail = ""
        if len(own) >= record.max_turns:
            detail = f"this session has had its {record.max_turns} turns (agent.max_turns): end it with its reward"
        elif record.max_tokens and _n_generated(own) >= record.max_tokens:
            detail = f"this session has had its {record.max_tokens} tokens (agent.max_tokens): end it with its reward"
        if detail:
            await self._manager.write([HashSet(session.redis_key, {names.session_limited(session.start): "1"})])
            raise openai_problem(400, "Session limit", detail, param="messages")
        if n_all >= record.n_ids:
            detail = "the agent was started again and made other calls than before: this session has no turns left"
            raise openai_problem(409, "Session over", detail)

    async def end(self, turn: SessionTurn) -> SampleFinished | SampleDropped | None:
        """Return the end of a turn that was opened by an earlier call, None if it is still generated."""
        text = await self._bus.hash_get(turn.redis_key, names.session_finished(turn.request.group))
        return None if text is None else _decoded(text)

    async def save_answer(self, turn: SessionTurn, answer: Message) -> None:
        """Store a turn's answer as its agent receives it, before the agent does.

        Raises:
            Fenced: another manager leads.
            BusUnavailable: it is unknown whether it is stored.

        """
        stored = {names.session_answer(turn.request.group): await digest_with(turn.messages, answer)}
        await self._manager.write([HashSet(turn.redis_key, stored)])

    async def _read(self, session: SessionId) -> _Known:
        """Return a session with its turns; those that are known are not read again."""
        key, known = session.redis_key, self._forget(session.redis_key)
        try:
            async with self._reads:
                if known is None or not await self._add_new(session, known):
                    world, stored = self._manager.world, await self._bus.hash_all(key)
                    known = _Known(world, _open_record(stored, session))
                    known.add(stored)
        except BusUnavailable as error:
            raise unavailable(error) from error
        self._remember(key, known)
        return known

    async def _add_new(self, session: SessionId, known: _Known) -> bool:
        """Add what is new of a session; return False if what is known of it may be out of date."""
        n_new = READ_AHEAD
        while n_new >= READ_AHEAD:
            if not known.turns or known.world is not self._manager.world:
                return False
            fields, last = known.missing, known.last
            stored = dict(zip(fields, await self._bus.hash_some(session.redis_key, fields), strict=True))
            if _open_record(stored, session) != known.record or stored[last] is None:
                return False  # it was over, and begins anew
            n_new = known.add(stored)
        return True

    def _forget(self, key: str) -> _Known | None:
        known, n_bytes = self._known.pop(key, (None, 0))
        self._n_bytes -= n_bytes
        return known

    def _remember(self, key: str, known: _Known) -> None:
        self._known[key] = known, known.n_bytes
        self._n_bytes += known.n_bytes
        while len(self._known) > MAX_SESSIONS or self._n_bytes > MAX_BYTES:
            _, (_, n_bytes) = self._known.popitem(last=False)
            self._n_bytes -= n_bytes


def _open_record(stored: Mapping[str, str | None], session: SessionId) -> SessionRecord:
    try:
        return check_leased(stored, session)
    except Problem as problem:
        raise openai_problem(problem.status, problem.title, problem.detail) from problem


def _asked(
    session: SessionId, record: SessionRecord, turn: _Turn, prompt: bytes, ops: Sequence[Op] = ()
) -> SessionTurn:
    """Return the turn that a call asks for, with what opens it."""
    own = {"max_tokens": turn.opened.max_tokens, "stop_token_ids": turn.opened.stop_token_ids}
    request = GroupRequested(
        job_id=session.job_id,
        group=turn.id,
        n=1,
        prompt=prompt,
        sampling=record.sampling.model_copy(update=own),
        version=record.version,
        seed=record.seed,
        max_staleness=record.max_staleness,
        vocab_size=record.vocab_size,
        session=session.sample,
    )
    return SessionTurn(request, turn.opened.messages, list(ops), turn.end)


def _repeated(same: Sequence[_Turn], retry: Retry, lost: Sequence[_Turn]) -> _Turn | None:
    """Return the turn of a call that is repeated, of several the newest that its agent has not received.

    Args:
        same: the turns of equal calls of this start of the agent, the oldest first.
        retry: how the client says that it repeats a call. Not all do.
        lost: those of them that the agent must have lost.

    """
    if retry.key:
        return next((turn for turn in same if turn.opened.key == retry.key), None)
    if lost or not retry.is_again:
        return lost[-1] if lost else None
    return max(reversed(same), key=lambda turn: turn.answer is None, default=None)


_NOT_TRAINED = (
    *("stop", "ignore_eos", "seed", "logit_bias", "top_logprobs"),
    *("response_format", "structured_outputs"),
)
"""Fields that a call in a session cannot have."""


def _check(body: ChatBody, record: SessionRecord) -> None:
    """Refuse what would have the turn drawn from another distribution than the one that is trained."""
    given = body.model_fields_set
    for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens"):
        if name in given and getattr(body, name) != (value := getattr(record.sampling, name)):
            detail = f"{name}: this session trains with {value:g}: leave it out, or set sampling.{name} of the job"
            raise _unsupported(detail, name)
    if body.n > 1:
        raise _unsupported("n: a session has one answer a turn: leave it out", "n")
    for name in _NOT_TRAINED:
        if getattr(body, name):
            more = ", or set sampling.stop of the job" if name == "stop" else ""
            raise _unsupported(f"{name}: not supported in a trainable session: leave it out{more}", name)
    if body.must_call:
        raise _unsupported(
            "tool_choice: a trainable session draws all answers alike: give 'auto' or 'none'", "tool_choice"
        )


def _unsupported(detail: str, param: str) -> Problem:
    return openai_problem(400, "Unsupported value", detail, param=param)


def _n_generated(turns: Sequence[_Turn]) -> int:
    return sum(length(turn.end.tokens) for turn in turns if isinstance(turn.end, SampleFinished))


def _max_tokens(body: ChatBody, record: SessionRecord, model: ServedModel, n_prompt: int, n_generated: int) -> int:
    most = record.sampling.max_tokens
    if record.max_tokens:
        most = min(most, record.max_tokens - n_generated)
    if model.files.max_len is not None:
        most = max(1, min(most, model.files.max_len - n_prompt))
    return most if body.requested_tokens is None else min(most, body.requested_tokens)


def _parent(turns: Sequence[_Turn], found: Sequence[str]) -> _Turn | None:
    """Return the turn with the most messages that a call continues; the newest of several.

    Args:
        turns: those that it may continue.
        found: the `digests` of its messages.

    """
    continued = [
        turn
        for turn in turns
        if turn.opened.n_messages + 1 < len(found)
        and turn.answer == found[turn.opened.n_messages + 1]
        and isinstance(turn.end, SampleFinished)
    ]
    return max(reversed(continued), key=lambda turn: turn.opened.n_messages, default=None)


def _opening(session: SessionId, turn: int, now: _Opened) -> list[Op]:
    """Return the operations that record a turn as its call asked for it, for the trainer and for later calls."""
    tokens = bytes.fromhex(now.tokens)
    message = TurnOpened(session=session.sample, sample=turn, parent=now.parent, tokens=tokens, start=now.start)
    return [
        Append(names.rollouts_finished(session.job_id), message),
        HashSet(session.redis_key, {names.session_opened(turn): now.model_dump_json()}),
    ]


def _whole(known: _Known, turn: _Turn) -> bytes:
    """Return prompt and completion of a turn that has ended."""
    assert isinstance(turn.end, SampleFinished), "only an answered turn is continued"
    return known.prompt(turn) + turn.end.tokens


def _decoded(text: str) -> SampleFinished | SampleDropped:
    end = decode(bytes.fromhex(text))
    assert isinstance(end, SampleFinished | SampleDropped), "`effects.store_turn` writes no other"
    return end


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
