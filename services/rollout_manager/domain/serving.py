"""Ends clients' samples (OpenAI endpoint): they share ledger and placement with the trainer's, but are not delivered.

A finished sample stays in the ledger until its client has it. The ledger is the only buffer: a slow client costs no
other memory, and a client that lost its connection may reconnect and read what was generated since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.services.rollout_manager.domain.sample_ends import deliver_to_client, drop
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import GroupRequested

GRACE_S = 30.0
"""How long the samples of a disconnected client that may reconnect continue."""


@dataclass(slots=True)
class Clients:
    """The state of the clients at this moment."""

    attended: set[int] = field(default_factory=set)
    """Groups whose client is connected."""
    satisfied: set[int] = field(default_factory=set)
    """Samples that the client has received completely: to the end, or to a stop string."""
    gone: dict[int, GroupRequested] = field(default_factory=dict)
    """Group whose client disconnected and cannot reconnect -> its request, which may not be admitted yet."""


NO_CLIENTS = Clients()


def end_served_samples(world: World, clients: Clients, now: Now) -> None:
    """End the samples that clients have received, and drop those that no client will fetch."""
    for sample in list(world.served.values()):
        group = sample.request.group
        if sample.id in clients.satisfied:
            deliver_to_client(world, sample)
        elif group in clients.gone:
            drop(world, sample, "the client disconnected")
        elif now.wall >= sample.request.expires_at:
            drop(world, sample, "out of time")
        elif group not in clients.attended and _grace_is_over(world, group, now):
            drop(world, sample, "the client did not reconnect")
    for group in [g for g in world.unattended_since if g in clients.attended or g not in world.ledger.open_in_group]:
        del world.unattended_since[group]


def _grace_is_over(world: World, group: int, now: Now) -> bool:
    return now.mono - world.unattended_since.setdefault(group, now.mono) > GRACE_S
