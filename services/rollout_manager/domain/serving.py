"""Samples that clients ask for over REST: the same ledger and placement as the trainer's, another end.

A finished sample stays in the ledger until its client has it. So the ledger is the only buffer there is: a client that
reads slowly costs nothing else, and one that lost its connection may come back for what was made meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.rollout_manager.domain.world import Now, World

GRACE_S = 30.0
"""How long the samples of a client that may come back go on without it."""


@dataclass(slots=True)
class Clients:
    """What is known of the clients, as of now."""

    attended: set[int] = field(default_factory=set)
    """Groups whose client is there."""
    content: set[int] = field(default_factory=set)
    """Samples of which the client has all that it wants: to the end, or to a stop string."""
    gone: set[int] = field(default_factory=set)
    """Groups whose client went and can not come back."""


NOBODY = Clients()


def serve(world: World, clients: Clients, now: Now) -> None:
    """End what clients have, and what they will not fetch any more."""
    for sample in list(world.served.values()):
        group = sample.request.group
        if sample.id in clients.content:
            world.hand_over(sample)
        elif group in clients.gone:
            world.drop(sample, "the client went")
        elif now.wall >= sample.request.expires_at:
            world.drop(sample, "out of time")
        elif group not in clients.attended and _over(world, group, now):
            world.drop(sample, "the client did not come back")
    for group in [g for g in world.unattended_since if g in clients.attended or g not in world.ledger.open_in_group]:
        del world.unattended_since[group]


def _over(world: World, group: int, now: Now) -> bool:
    return now.mono - world.unattended_since.setdefault(group, now.mono) > GRACE_S
