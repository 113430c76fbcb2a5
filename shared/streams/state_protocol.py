"""The protocol number in Redis: the leader writes it, and no service works on data of a protocol it cannot read.

A manager continues the state of older protocols down to `OLDEST_STATE`, and never that of a newer one: it would drop
what it does not understand. Trainers and the weight store run only with a manager of their own number.
"""

from __future__ import annotations

import asyncio

from rlboost.shared.errors import BusUnavailable, ConfigError
from rlboost.shared.messages.codec import OLDEST_STATE, PROTOCOL
from rlboost.shared.process.lifecycle import Loop, until_stop
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, HashSet, Op

_FIELD = "number"
_CHECK_EVERY_S = 2.0


async def check_state(bus: Bus) -> list[Op]:
    """Return the operations by which a new leader writes its number, none if it is written already.

    Raises:
        ConfigError: this release cannot continue the state in Redis.

    """
    stored = await _stored(bus)
    if stored is not None and not OLDEST_STATE <= stored <= PROTOCOL:
        raise ConfigError(
            f"the state in Redis has protocol {stored} and this manager continues {OLDEST_STATE} to {PROTOCOL}; "
            "nothing was changed: start the version of rlboost that wrote it"
        )
    return [] if stored == PROTOCOL else [HashSet(names.PROTOCOL, {_FIELD: str(PROTOCOL)})]


async def check_leader(bus: Bus) -> None:
    """Check that the manager that led last has this protocol.

    Raises:
        ConfigError: it has another.

    """
    stored = await _stored(bus)
    if stored not in {None, PROTOCOL}:
        raise ConfigError(
            f"the manager has protocol {stored} and this process {PROTOCOL}: install the same version of rlboost on "
            "both, on the manager first"
        )


def leader_check(bus: Bus) -> Loop:
    """Return a loop that fails with `ConfigError` once a manager with another protocol leads."""

    async def run(stop: asyncio.Event) -> None:
        while not await until_stop(stop, _CHECK_EVERY_S):
            try:
                await check_leader(bus)
            except BusUnavailable:
                continue  # the other loops wait for Redis, with a limit

    return run


async def _stored(bus: Bus) -> int | None:
    stored = await bus.hash_get(names.PROTOCOL, _FIELD)
    return int(stored) if stored else None
