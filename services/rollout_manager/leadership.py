"""Leader election among managers: one holds a lease that names it, under an epoch that fences every earlier leader.

A leader acquires its own lease again after each write that had no reply: the write may still arrive, and the new epoch
rejects it before the world is rebuilt. See `shared.streams.fenced_lease`.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import structlog
from pydantic import BaseModel, ConfigDict

from rlboost.shared.errors import BusUnavailable, ConfigError, Fenced
from rlboost.shared.http.access import is_valid_signature, sign
from rlboost.shared.http.server_url import server_url
from rlboost.shared.ids import new_token
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, Fence, Op
from rlboost.shared.streams.fenced_lease import FencedLease
from rlboost.shared.streams.state_protocol import check_state

log = structlog.get_logger(__name__)

# --- the leader's process ---------------------------------------------------------------------------------------------
#
# A standby watches it through a TCP connection, which the kernel closes when the process dies.


_CONNECT_LIMIT_S = 1.0
_RECONNECT_PAUSE_S = 0.05


class LeaderConnection:
    """A connection to one manager at a time. It carries nothing, in particular no token."""

    def __init__(self) -> None:
        """Start without a connection; the first request opens one."""
        self._url = ""
        """The last manager to which a connection was open."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def has_died(self, url: str, limit_s: float) -> bool:
        """Return True as soon as a process that listened at the URL has died; False after the limit.

        Only a connection that was open before counts: an address that always refuses may be behind a firewall. A leader
        that closed it and still listens, for example through a proxy, lives. The machine's death closes nothing.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + limit_s
        if url != self._url:
            await self._connect(url)
        while url == self._url and (left_s := limit - loop.time()) > 0:
            if self._reader is not None and not await _ends(self._reader, left_s):
                return False
            if await self._connect(url):
                return True
            await asyncio.sleep(_RECONNECT_PAUSE_S)  # a dying process may still listen
        await asyncio.sleep(limit - loop.time())
        return False

    async def _connect(self, url: str) -> bool:
        """Connect if possible; return True if the address refuses connections."""
        await self.close()
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                self._reader, self._writer = await asyncio.open_connection(parts.hostname or "", port)
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):  # an unreachable network, a timeout or an invalid URL prove nothing
            return False
        if url != self._url:  # a leader closes connections that send nothing for some seconds
            log.info("leader_watched", url=url)
        self._url = url
        return False

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


async def _ends(reader: asyncio.StreamReader, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            return not await reader.read(1)
    except TimeoutError:
        return False
    except OSError:
        return True


# --- election ---------------------------------------------------------------------------------------------------------


LEASE_S = 3.0
RECOVERY_LEASE_S = 30.0
"""The lease during a recovery. It is renewed between batches of entries; no batch takes this long."""
_RENEWALS_PER_LEASE = 3
_CHECKS_PER_LEASE = 10
"""How often a standby checks the lease in the time that one lasts."""


class ManagerRecord(BaseModel):
    """A manager, as the leader's lease names it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    manager: str
    """Identifies one run of one process."""
    address: str
    """Where it listens; only one process can listen there at a time."""
    url: str
    """Where clients reach it."""
    signature: str = ""
    """Proves that the record's author has the token; standbys redirect clients, with their tokens, to `url`."""

    def signed(self, token: str) -> ManagerRecord:
        """Return a copy with a signature."""
        return self.model_copy(update={"signature": sign(token, "leader", self.url)})

    def is_signed(self, token: str) -> bool:
        """Return True if the record was signed with this token."""
        return is_valid_signature(self.signature, token, "leader", self.url)


def manager_record(host: str, port: int, machine: str, public_url: str = "", *, tls: bool = False) -> ManagerRecord:
    """Return the record of a manager that listens on an address.

    Args:
        host: the address, as bound.
        port: the port, as bound.
        machine: the host's name, used in the URL if `host` means all interfaces.
        public_url: where clients reach it; derived from the other arguments when empty.
        tls: it serves HTTPS.

    """
    url_host = machine if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    url = public_url or server_url(url_host, port, tls=tls)
    return ManagerRecord(manager=new_token(8), address=f"{machine}/{host}/{port}", url=url.rstrip("/"))


class Leadership:
    """One manager's part in the election. Who leads is as of the last check of the lease."""

    def __init__(self, bus: Bus, record: ManagerRecord, lease_s: float) -> None:
        """Create a candidate.

        Args:
            bus: the broker.
            record: describes this manager to the others.
            lease_s: how long a leader may be silent until another takes over.

        """
        self.record = record
        self.check_every_s = lease_s / _CHECKS_PER_LEASE
        self._bus = bus
        self._value = record.model_dump_json()
        self._lease = FencedLease(bus, names.MANAGER_LEASE, names.MANAGER_EPOCH, lease_s)
        self._lease_s = lease_s
        self._recovery_lease_s = max(lease_s, RECOVERY_LEASE_S)
        self._renewed_at = self._recovery_renewed_at = float("-inf")
        self._may_succeed_address = True
        self._leader: ManagerRecord | None = None
        self._dead = ""
        """The manager that may be replaced before its lease expires."""
        self._highest_epoch = 0
        self.redis_lost_data = False
        """True if the epoch had fallen when this manager acquired the lease: Redis has lost its data. The manager sets
        it to False once it has restored what it knows, which may take several tries."""

    @property
    def leads(self) -> bool:
        """Return True if this manager leads, as far as it knows."""
        return self._lease.is_held

    @property
    def fence(self) -> Fence:
        """The fence for the leader's transactions.

        Raises:
            Fenced: this manager does not lead.

        """
        if self._lease.fence is None:
            raise Fenced(f"{self.record.url} does not lead, or no longer does")
        return self._lease.fence

    @property
    def other_leader(self) -> ManagerRecord | None:
        """Return the other manager that led at the last check, None if there was none."""
        is_other = self._leader is not None and self._leader.manager != self.record.manager
        return self._leader if is_other else None

    async def try_acquire(self) -> bool:
        """Become the leader under a new epoch unless another manager leads; return True on success.

        Raises:
            ConfigError: this release cannot continue the state in Redis; nothing was written.

        """
        self._lease.invalidate()
        await check_state(self._bus)
        held = await self._lease.holder()
        epoch = await self._bus.counter(names.MANAGER_EPOCH)
        before, self._highest_epoch = self._highest_epoch, max(self._highest_epoch, epoch)
        self._leader = None if held is None else ManagerRecord.model_validate_json(held)
        if self._leader is not None and not self._may_replace(self._leader):
            self._may_succeed_address = False
            return False
        if not await self._lease.acquire(self._value, replacing=held, ttl_s=self._recovery_lease_s):
            return False
        self.redis_lost_data |= epoch < before
        self._highest_epoch = self._lease.epoch or 0
        await self._write_protocol()
        self._may_succeed_address = False
        self._dead = ""
        self._renewed_at = self._recovery_renewed_at = float("-inf")
        self._leader = self.record
        log.info("leadership_acquired", epoch=self._lease.epoch, url=self.record.url)
        return True

    async def _write_protocol(self) -> None:
        try:
            # Checked again: only now can no other manager write it.
            await self._bus.transact(await check_state(self._bus), self.fence)
        except ConfigError:
            await self.resign()
            raise

    def _may_replace(self, leader: ManagerRecord) -> bool:
        # A process that has bound the leader's address is its successor: the leader is dead. This counts once in a
        # process's life, so that two managers that share an address by mistake do not replace each other forever.
        same_address = self._may_succeed_address and leader.address == self.record.address
        return same_address or leader.manager in {self.record.manager, self._dead}

    def replace_dead(self, leader: ManagerRecord) -> None:
        """Let the next `try_acquire` replace a leader whose process has died; if it lives, its writes are fenced."""
        log.info("leader_died", url=leader.url)
        self._dead = leader.manager

    def renewal(self, now: float) -> list[Op]:
        """Return the operations that renew the lease when it is time, for a transaction under `fence`."""
        if now - self._renewed_at < self._lease_s / _RENEWALS_PER_LEASE:
            return []
        self._renewed_at = now
        return [self._lease.renewal(self._value)]

    def recovery_renewal(self, now: float) -> list[Op]:
        """Return the operations that renew the lease for the length of a recovery's when it is time."""
        if now - self._recovery_renewed_at < self._recovery_lease_s / _RENEWALS_PER_LEASE:
            return []
        self._recovery_renewed_at = now
        return [self._lease.renewal(self._value, ttl_s=self._recovery_lease_s)]

    def invalidate(self, fence: Fence) -> None:
        """Stop leading under `fence`, until the lease is acquired again: a write had no reply, or was refused."""
        self._lease.invalidate(fence)

    async def resign(self) -> None:
        """Free the lease, so that a standby need not wait until it expires."""
        if not self._lease.is_held:
            return
        self._leader = None
        try:
            await self._lease.release()
        except (BusUnavailable, Fenced) as error:
            log.warning("lease_release_failed", error=str(error))
