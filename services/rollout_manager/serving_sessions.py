"""Conversations: what was given to the model and made by it stays the tokens that it was, turn by turn.

Text that is tokenized anew may become other tokens than the model has made, and then neither logprobs nor a prefix
cache fit. So of a next turn only what is new is tokenized, and put behind the tokens of the turns before.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.rollout_manager.app import Manager
from services.rollout_manager.serving_model import ServedModel
from shared import names
from shared.bus import Bus, Delete, Expire, HashSet, Op
from shared.columns import I32, ints, pack

KEPT_S = 3600.0
"""How long a conversation is kept after its last turn."""
MAX_SESSIONS = 4096
"""That one manager keeps: beyond it those are forgotten that were not gone on with for longest."""
_FIELD = "turn"
_NOTHING: dict[str, Any] = {"messages": [], "prompt": "", "made": "", "worker": ""}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation that was asked for."""

    key: str
    messages: list[Message]
    prompt: list[int]
    near: str
    """The worker that made the last turn; empty when there is none."""


class Sessions:
    """The conversations of all jobs. They are in Redis: a manager's death does not end them."""

    def __init__(self, manager: Manager, bus: Bus) -> None:
        """Read from the bus, and write as the manager does."""
        self._manager, self._bus = manager, bus
        self._written: OrderedDict[str, None] = OrderedDict()

    async def turn(self, job_id: str, session: str, model: ServedModel, messages: list[Message]) -> Turn:
        """Return the next turn, or the last one again when it is asked for again.

        A conversation that does not go on from the last turn begins anew, with all its text tokenized.

        Raises:
            Untranslatable: see `ServedModel`.
            BusUnavailable: try again.

        """
        digest = blake2b(f"{job_id}/{session}".encode(), digest_size=16).hexdigest()
        key = names.serving_session(digest)
        stored = await self._bus.hash_get(key, _FIELD)
        last: dict[str, Any] = json.loads(stored) if stored else _NOTHING
        before, n = last["messages"], len(last["messages"])
        prompt, made = (ints(bytes.fromhex(last[part]), I32) for part in ("prompt", "made"))
        if n and _same(messages, before[:-1]):
            tokens = prompt
        elif n and len(messages) > n and _same(messages[:n], before):
            tokens = await asyncio.to_thread(model.chat_after, [*prompt, *made], messages, n - 1)
        else:
            tokens = await asyncio.to_thread(model.chat, messages)
        return Turn(key, messages, tokens, last["worker"])

    async def keep(self, turn: Turn, text: str, made: Sequence[int], worker: str) -> None:
        """Remember how a turn has ended.

        Args:
            turn: the turn.
            text: the answer as the client has it.
            made: the tokens of which it is.
            worker: who made the last of them.

        Raises:
            Fenced: another manager leads.
            BusUnavailable: it is unknown whether it is kept.

        """
        last = {
            "messages": [*turn.messages, {"role": "assistant", "content": text}],
            "prompt": pack(turn.prompt, I32).hex(),
            "made": pack(made, I32).hex(),
            "worker": worker,
        }
        ops: list[Op] = [HashSet(turn.key, {_FIELD: json.dumps(last)}), Expire(turn.key, KEPT_S)]
        self._written[turn.key] = None
        self._written.move_to_end(turn.key)
        while len(self._written) > MAX_SESSIONS:
            ops.append(Delete(self._written.popitem(last=False)[0]))
        await self._manager.write(ops)


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return [_said(message) for message in one] == [_said(message) for message in other]


def _said(message: Message) -> Message:
    """Return what makes a message this one: of an answer its text alone, to which client libraries add fields."""
    if message["role"] == "assistant":
        return {"role": "assistant", "content": message["content"]}
    return message
