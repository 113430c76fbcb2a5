"""Messages applied to a world at one time."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Store
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Event, Message
from rlboost.shared.streams.bus import Append

NOW = Now(mono=100.0, wall=1000.0)


def prove(world: World) -> None:
    """Let every worker have a full batch, as after its first tokens."""
    for worker in world.fleet.workers.values():
        worker.trust.allowance = math.inf


def apply(world: World, *messages: Message) -> list[Effect]:
    """Return the effects."""
    effects: list[Effect] = []
    for number, message in enumerate(messages, 1):
        effects += apply_message(world, message, f"{number}-0", NOW)
    return effects


def events_in(effects: Iterable[Effect]) -> list[tuple[str, Event]]:
    """Return the events that effects store, each with its stream."""
    ops = [op for effect in effects if isinstance(effect, Store) for op in effect.ops]
    return [(op.stream, op.message) for op in ops if isinstance(op, Append) and isinstance(op.message, Event)]
