"""Messages applied to a world at one time."""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import Message

NOW = Now(mono=100.0, wall=1000.0)


def apply(world: World, *messages: Message) -> None:
    for number, message in enumerate(messages, 1):
        apply_message(world, message, f"{number}-0", NOW)
