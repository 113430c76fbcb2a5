"""The workers' Redis users: what one of them may do is what a worker does, on its own keys.

No user may write to a stream that another service or worker reads: XADD can also trim, which an ACL cannot forbid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog

from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.redis.bus import RedisBus, as_text
from rlboost.shared.streams import names

log = structlog.get_logger(__name__)

SETTING = "RLBOOST_MANAGER_WORKER_REDIS_USERS"
_SELECTORS_SINCE = 7
"""The Redis release that can limit a command to certain keys, and a key to reading."""
_CONNECTION = ("+ping", "+client|setname", "+select", "+multi", "+exec", "+discard")
_PROBE = "probe"
"""A user that is created and removed at the start. No worker has this id: it lacks a suffix."""


class RedisWorkerUsers:
    """`ports.WorkerUsers` on one Redis server."""

    def __init__(self, bus: RedisBus) -> None:
        """Use an open bus, whose user may manage users; see `check`."""
        self._bus = bus
        self._has_selectors = True

    async def check(self) -> None:
        """Find out what this Redis supports.

        Raises:
            ConfigError: it has no users, or this user may not manage them.

        """
        try:
            version = str((await self._bus.command("INFO", "server"))["redis_version"])
            self._has_selectors = int(version.partition(".")[0]) >= _SELECTORS_SINCE
            await self.put(_PROBE, "0" * 64)
            await self.remove([_PROBE])
            await self.present()
        except Fatal as error:
            raise ConfigError(
                f"each worker gets a Redis user of its own, which is not possible here ({error}): allow the manager's "
                f"user ACL SETUSER, ACL DELUSER, ACL USERS and INFO, or set {SETTING}=off if you trust all workers: "
                "they then get the manager's Redis URL"
            ) from error
        if not self._has_selectors:
            log.warning(
                "redis_users_less_strict",
                redis_version=version,
                reason="before Redis 7 a worker can disturb the manager and other workers' weight transfers: "
                "use Redis 7 or newer if you do not trust all workers",
            )

    async def put(self, worker: str, secret_sha256: str) -> None:
        """See `WorkerUsers.put`."""
        rules = _rules(worker) if self._has_selectors else _rules_without_selectors(worker)
        user = names.worker_redis_user(worker)
        await self._bus.command("ACL", "SETUSER", user, "reset", "on", f"#{secret_sha256}", *rules)

    async def remove(self, workers: Collection[str]) -> None:
        """See `WorkerUsers.remove`."""
        await self._bus.command("ACL", "DELUSER", *map(names.worker_redis_user, workers))

    async def present(self) -> set[str]:
        """See `WorkerUsers.present`."""
        found = [as_text(user) for user in await self._bus.command("ACL", "USERS")]
        prefix = names.worker_redis_user("")
        return {user.removeprefix(prefix) for user in found if user.startswith(prefix)}


def _rules(worker: str) -> Sequence[str]:
    own_leases = f"~{names.worker_lease(worker)} ~{names.weight_peer(worker)} ~{names.weight_claim('*')}"
    return (
        *_CONNECTION,
        f"(+xread %R~{names.worker_commands(worker)})",
        f"(+xtrim ~{names.worker_commands(worker)})",
        f"(+xadd +xlen ~{names.worker_reports(worker)})",
        f"(+set +get +mget +del {own_leases})",
        f"(+mget %R~{names.weight_peer('*')})",
        f"(+hgetall %R~{names.WEIGHT_PEERS})",
    )


def _rules_without_selectors(worker: str) -> Sequence[str]:
    keys = (
        names.worker_commands(worker),
        names.worker_reports(worker),
        names.worker_lease(worker),
        names.weight_peer("*"),
        names.weight_claim("*"),
        names.WEIGHT_PEERS,
    )
    commands = ("+xread", "+xtrim", "+xadd", "+xlen", "+set", "+get", "+mget", "+del", "+hgetall")
    return (*_CONNECTION, *commands, *(f"~{key}" for key in keys))
