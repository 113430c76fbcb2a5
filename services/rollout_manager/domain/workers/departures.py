"""Decides when a worker's identity is removed: some time after the worker has left, or was lost."""

from __future__ import annotations

from collections.abc import Collection

from rlboost.services.rollout_manager.domain.workers.fleet import Fleet

LEFT_RETENTION_S = 5.0
"""After its last message a worker still withdraws its entry in the peer directory."""
ABSENT_RETENTION_S = 900.0
"""A worker that joins, or returns after an outage, needs its identity. It exits after an outage of 600 s."""


class Departures:
    """Records since when each identity has no worker; a new leader counts from its start."""

    def __init__(self) -> None:
        self._absent_since: dict[str, float] = {}

    def due(self, workers: Collection[str], fleet: Fleet, now: float) -> list[str]:
        """Return the workers whose identities are to be removed.

        Args:
            workers: all that have an identity.
            fleet: the workers that are present.
            now: the manager's clock.

        """
        self._absent_since = {
            worker: self._absent_since.get(worker, now) for worker in workers if worker not in fleet.workers
        }
        return [worker for worker, since in self._absent_since.items() if now - since >= _retention_s(fleet, worker)]


def _retention_s(fleet: Fleet, worker: str) -> float:
    gone = fleet.gone.get(worker)
    return LEFT_RETENTION_S if gone is not None and gone.state == "left" else ABSENT_RETENTION_S
