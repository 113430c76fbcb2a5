"""Multi-turn conversations of chat clients: the tokens of earlier turns are reused as they were generated.

Text that is tokenized again may become other tokens than the model generated, which would invalidate log-probabilities
and prefix caches. So only the new messages of a turn are tokenized, and appended to the tokens of the turns before.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.openai.served_model import ServedModel
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, Delete, Expire, HashSet, Op
from rlboost.shared.wire.columns import I32, ints, pack

CONVERSATION_TTL_S = 3600.0
"""How long a conversation is retained after its last turn."""
MAX_CONVERSATIONS = 4096
"""Maximum number of conversations that one manager retains; beyond it, the least recently used ones are deleted."""
_FIELD = "turn"
_NO_TURN: dict[str, Any] = {"messages": [], "prompt": "", "completion": "", "worker": ""}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One requested turn of a conversation."""

    key: str
    messages: list[Message]
    prompt: list[int]
    preferred_worker: str
    """The worker that generated the previous turn; empty without one."""


class Conversations:
    """The conversations of all jobs, stored in Redis so that they survive the manager."""

    def __init__(self, manager: Manager, bus: Bus) -> None:
        """Read from the bus, and write through the manager."""
        self._manager, self._bus = manager, bus
        self._written: OrderedDict[str, None] = OrderedDict()

    async def next_turn(self, job_id: str, session: str, model: ServedModel, messages: list[Message]) -> Turn:
        """Return the next turn, or the last one again if it is requested again.

        A conversation that does not continue the last turn starts over: all its text is tokenized.

        Raises:
            TokenizationError: see `ServedModel`.
            BusUnavailable: try again.

        """
        digest = blake2b(f"{job_id}/{session}".encode(), digest_size=16).hexdigest()
        key = names.serving_session(digest)
        stored = await self._bus.hash_get(key, _FIELD)
        last: dict[str, Any] = json.loads(stored) if stored else _NO_TURN
        previous, n = last["messages"], len(last["messages"])
        prompt, completion = (ints(bytes.fromhex(last[name]), I32) for name in ("prompt", "completion"))
        if n and _same(messages, previous[:-1]):
            tokens = prompt
        elif n and len(messages) > n and _same(messages[:n], previous):
            tokens = await asyncio.to_thread(model.extend_chat, [*prompt, *completion], messages, n - 1)
        else:
            tokens = await asyncio.to_thread(model.encode_chat, messages)
        return Turn(key, messages, tokens, last["worker"])

    async def save(self, turn: Turn, text: str, completion: Sequence[int], worker: str) -> None:
        """Store a turn with its answer.

        Args:
            turn: the turn.
            text: the answer as the client receives it.
            completion: the answer's tokens.
            worker: the worker that generated the last of them.

        Raises:
            Fenced: another manager leads.
            BusUnavailable: it is unknown whether the turn is stored.

        """
        last = {
            "messages": [*turn.messages, {"role": "assistant", "content": text}],
            "prompt": pack(turn.prompt, I32).hex(),
            "completion": pack(completion, I32).hex(),
            "worker": worker,
        }
        ops: list[Op] = [HashSet(turn.key, {_FIELD: json.dumps(last)}), Expire(turn.key, CONVERSATION_TTL_S)]
        self._written[turn.key] = None
        self._written.move_to_end(turn.key)
        while len(self._written) > MAX_CONVERSATIONS:
            ops.append(Delete(self._written.popitem(last=False)[0]))
        await self._manager.write(ops)


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return [_identity(message) for message in one] == [_identity(message) for message in other]


def _identity(message: Message) -> Message:
    """Return the fields that identify a message; client libraries add others to an answer than its text."""
    if message["role"] == "assistant":
        return {"role": "assistant", "content": message["content"]}
    return message
