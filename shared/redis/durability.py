"""Whether a Redis server keeps what it acknowledges: it must evict no keys, and write each command to its disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlboost.shared.errors import Fatal
from rlboost.shared.redis.bus import RedisBus, as_text

_SETTING = "RLBOOST_MANAGER_REDIS_DURABILITY"
CLUSTER = "it is a node of Redis Cluster, which has no transactions over several keys: set cluster-enabled no"
"""Why no manager starts on such a server, whatever its settings."""


class Durability(NamedTuple):
    """What a server says of itself; texts are empty where it does not say."""

    policy: str = ""
    """`maxmemory-policy`."""
    has_file: bool | None = None
    """Whether it has an append-only file."""
    sync: str = ""
    """`appendfsync`; many managed services forbid to ask."""
    evicted: int = 0
    """Keys evicted since its start."""
    is_cluster: bool = False
    """Whether it is a node of Redis Cluster."""

    @property
    def losses(self) -> list[str]:
        """Return why it loses data in normal operation, each with what to set; empty if it does not."""
        found = [CLUSTER] if self.is_cluster else []
        if self.policy not in {"", "noeviction"}:
            found.append(
                f"maxmemory-policy {self.policy} removes keys, such as leases and samples, when memory is short: set "
                "maxmemory-policy noeviction"
            )
        if self.has_file is False:
            found.append("appendonly no loses everything at a restart: set appendonly yes and appendfsync always")
        elif self.sync == "no":
            found.append("appendfsync no loses what it acknowledged: set appendfsync always")
        return found

    @property
    def warnings(self) -> list[str]:
        """Return what may lose data after a crash, and what has been lost."""
        found = []
        if self.sync == "everysec" and self.has_file is not False:
            found.append(
                "appendfsync everysec may lose up to two seconds of acknowledged writes when Redis is killed, and a "
                "job may hang: set appendfsync always"
            )
        if self.evicted:
            found.append(
                f"{self.evicted} keys were evicted since Redis started: jobs that stand still must be started again"
            )
        return found


async def durability(bus: RedisBus) -> Durability:
    """Return what a server says of itself, as far as this user may ask. Raises `BusUnavailable`."""
    try:
        parts = ("memory", "persistence", "stats", "cluster")
        memory, persistence, stats, cluster = [await bus.command("INFO", part) for part in parts]
    except Fatal:  # this user may not ask
        return Durability()
    try:
        reply = await bus.command("CONFIG", "GET", "appendfsync")
    except Fatal:  # a managed service, or this user may not ask
        reply = {}
    return read(memory, persistence, stats, cluster, reply)


def read(
    memory: Mapping[str, object],
    persistence: Mapping[str, object],
    stats: Mapping[str, object],
    cluster: Mapping[str, object],
    config: object,
) -> Durability:
    """Return the durability that the sections of INFO and the reply to CONFIG GET appendfsync say."""
    pairs = config.items() if isinstance(config, Mapping) else zip(*[iter(config or ())] * 2, strict=False)  # type: ignore[call-overload]
    has_file = persistence.get("aof_enabled")
    return Durability(
        policy=str(memory.get("maxmemory_policy", "")),
        has_file=None if has_file is None else str(has_file) == "1",
        sync=next((as_text(value) for name, value in pairs if as_text(name) == "appendfsync"), ""),
        evicted=int(str(stats.get("evicted_keys", 0))),
        is_cluster=str(cluster.get("cluster_enabled")) == "1",
    )


def refusal(losses: list[str], address: str) -> str:
    """Return the error of a manager that does not start on such a server."""
    return (
        f"Redis at {address} would lose jobs and samples: {'; '.join(losses)}; or set {_SETTING}=off if you accept that"
    )
