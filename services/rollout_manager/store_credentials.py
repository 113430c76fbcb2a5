"""Renews the credentials with which workers download weights.

Consumes: the fleet of the manager's world.
Produces: credentials, which the manager's next turn sends: for each worker when it joins, and before half of the last
    one's life is over; after a recovery for all workers, since it is unknown when they got theirs.
Waits for: the next second.
Ends when: the stop is set. A standby sends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.http.store_credential import STORE_CREDENTIAL_LIFE_S, issue_store_credential
from rlboost.shared.messages import StoreCredential
from rlboost.shared.process.lifecycle import until_stop

_CHECK_INTERVAL_S = 1.0


class StoreCredentials:
    """Sends each worker of the fleet its credential.

    Args:
        manager: whose workers.
        token: the system's, which signs credentials.
        life_s: how long a credential is valid.
        clock: Unix seconds.

    """

    def __init__(
        self,
        manager: Manager,
        token: str,
        *,
        life_s: float = STORE_CREDENTIAL_LIFE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._manager = manager
        self._token = token
        self._life_s = life_s
        self._clock = clock
        self._world: World | None = None
        self._sent_at: dict[str, float] = {}
        """Worker -> when its last credential was issued."""

    async def run(self, stop: asyncio.Event) -> None:
        """Renew credentials until the stop."""
        while not await until_stop(stop, _CHECK_INTERVAL_S):
            if self._manager.leads:
                self.renew()

    def renew(self) -> None:
        """Have the manager's next turn send a credential to each worker that needs one."""
        world, now = self._manager.world, self._clock()
        if world is not self._world:
            # Rebuilt: what was handed over for the last one may not have been sent.
            self._world, self._sent_at = world, {}
        workers = world.fleet.workers
        self._sent_at = {worker: at for worker, at in self._sent_at.items() if worker in workers}
        # At 0.4, so that the next one arrives before half of the life is over.
        due = [w for w in workers if w not in self._sent_at or now - self._sent_at[w] >= 0.4 * self._life_s]
        self._sent_at.update(dict.fromkeys(due, now))
        credentials = {worker: issue_store_credential(self._token, worker, now, self._life_s) for worker in due}
        self._manager.at_next_turn(lambda world, _: _send(world, credentials))


def _send(world: World, credentials: Mapping[str, str]) -> None:
    for worker, credential in credentials.items():
        if worker in world.fleet.workers:
            world.outbox.send(worker, StoreCredential(credential=credential))
