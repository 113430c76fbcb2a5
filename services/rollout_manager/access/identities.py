"""The identities of workers: each incarnation has an id, a stream of its own and, unless disabled, a Redis user.

The leader creates an identity when a worker joins and removes it after the worker is gone. Identities are stored in
Redis; the users follow them, since Redis forgets its users when it restarts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from rlboost.services.rollout_manager.domain.access_tokens import SECRET_BYTES, digest_of_secret
from rlboost.services.rollout_manager.domain.workers.departures import Departures
from rlboost.services.rollout_manager.domain.workers.fleet import Fleet
from rlboost.services.rollout_manager.ports import WorkerUsers
from rlboost.shared.ids import new_token
from rlboost.shared.messages import Role
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, Delete, HashDelete, HashSet, Op

log = structlog.get_logger(__name__)

Write = Callable[[Sequence[Op]], Awaitable[None]]
"""Applies operations as the leader."""


class IdentityRecord(BaseModel):
    """One worker's identity, as stored in Redis."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    secret_sha256: str = ""
    """SHA-256 of the password of its Redis user, in hexadecimal; empty if it has none."""


class WorkerIdentities:
    """The identities that the leader knows."""

    def __init__(self, bus: Bus, users: WorkerUsers | None = None) -> None:
        """Start empty.

        Args:
            bus: the broker.
            users: the workers' Redis users; None if workers use the manager's.

        """
        self._bus = bus
        self._users = users
        self._records: dict[str, IdentityRecord] = {}
        self._revoked: set[str] = set()
        """Workers whose users were removed; their streams are removed next."""
        self._departures = Departures()

    @property
    def roles(self) -> dict[str, Role]:
        """Return worker id -> role."""
        return {worker: record.role for worker, record in self._records.items()}

    @property
    def have_users(self) -> bool:
        """Return True if each worker has a Redis user of its own."""
        return self._users is not None

    async def load(self) -> None:
        """Replace what is known by what Redis has, as a new leader, and restore the Redis users."""
        self._records.clear()
        self._revoked.clear()
        for worker, text in (await self._bus.hash_all(names.WORKER_IDENTITIES)).items():
            try:
                self._records[worker] = IdentityRecord.model_validate_json(text)
            except ValidationError as error:
                log.warning("worker_identity_unreadable", worker=worker, reason=str(error))
        await self._update_users()

    async def create(self, name: str, role: Role, write: Write) -> tuple[str, str]:
        """Return the id of a new worker and the password of its Redis user, empty if it has none."""
        worker = f"{name}-{new_token()}"
        secret = new_token(SECRET_BYTES) if self._users else ""
        record = IdentityRecord(role=role, secret_sha256=digest_of_secret(secret) if secret else "")
        self._records[worker] = record  # first, so that a concurrent update does not remove the new user
        await write([HashSet(names.WORKER_IDENTITIES, {worker: record.model_dump_json()})])
        if self._users:
            await self._users.put(worker, record.secret_sha256)
        return worker, secret

    async def maintain(self, fleet: Fleet, now: float, write: Write) -> None:
        """Remove identities of workers that are gone: first the user, then the stream, once it is relayed."""
        due = set(self._departures.due(self._records, fleet, now))
        emptied = [worker for worker in due & self._revoked if not await self._bus.length(names.worker_reports(worker))]
        if emptied:
            deletes = [Delete(names.worker_reports(worker)) for worker in emptied]
            await write([*deletes, HashDelete(names.WORKER_IDENTITIES, tuple(emptied))])
            for worker in emptied:
                del self._records[worker]
        self._revoked = due - set(emptied)
        await self._update_users()

    async def _update_users(self) -> None:
        if self._users is None:
            return
        present = await self._users.present()
        expected = self._records.keys() - self._revoked
        if unexpected := present - expected:
            await self._users.remove(unexpected)
        for worker in expected - present:
            await self._users.put(worker, self._records[worker].secret_sha256)
