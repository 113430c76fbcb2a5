"""Which manager leads: a lease that tells everybody who, and an epoch that shuts out whoever led before.

The lease alone is not safe. A leader may be paused for longer than its lease, wake up in the middle of a write and not
know it. So whoever takes the lease raises the epoch in the same breath, and each transaction of a leader takes place
only while the epoch is still its own. A lease that has run out costs nobody anything until somebody takes it, and no
clock but Redis's matters.

A manager takes its own lease anew each time it has had no answer to a write: the write may be on its way still, and
the new epoch shuts it out before the world is rebuilt.
"""

from __future__ import annotations

import structlog
from pydantic import BaseModel, ConfigDict

from shared import names
from shared.bus import Bus, Delete, Fence, Op, Renew
from shared.errors import BusUnavailable, Fenced
from shared.ids import new_token
from shared.proof import is_proved, prove

log = structlog.get_logger(__name__)

LEASE_S = 3.0
RECOVERY_LEASE_S = 30.0
"""The lease while the world is rebuilt, which may keep the loop from renewing: no world takes that long."""
_RENEWALS = 3
"""In the time of a lease."""
_LOOKS = 10
"""Of a standby, in the time of a lease."""


class Leader(BaseModel):
    """A manager as the lease names it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    manager: str
    """One life of one process."""
    address: str
    """Where it listens, as only one process can at a time."""
    url: str
    """Where clients reach it."""
    proof: str = ""
    """That whoever wrote the lease has the token: clients are sent to `url`, and send theirs along."""

    def signed(self, token: str) -> Leader:
        """Return the same with a proof."""
        return self.model_copy(update={"proof": prove(token, "leader", self.url)})

    def is_signed(self, token: str) -> bool:
        """Tell whether whoever wrote this has the token."""
        return is_proved(self.proof, token, "leader", self.url)


def manager_at(host: str, port: int, machine: str, public_url: str = "") -> Leader:
    """Return who a manager is that has bound this address.

    Args:
        host: as bound.
        port: as bound.
        machine: the host's name; stands in the URL for an address that means all interfaces.
        public_url: where clients reach it; derived from the others when empty.

    """
    named = machine if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    url = public_url or f"http://{f'[{named}]' if ':' in named else named}:{port}"
    return Leader(manager=new_token(8), address=f"{machine}/{host}/{port}", url=url.rstrip("/"))


class Leadership:
    """One manager's part in it. Whether it leads, and who does otherwise, is as of the last look."""

    def __init__(self, bus: Bus, me: Leader, lease_s: float) -> None:
        """Lead nothing yet.

        Args:
            bus: the broker.
            me: as others shall see this manager.
            lease_s: how long a leader may be silent.

        """
        self._bus = bus
        self._me = me
        self._value = me.model_dump_json()
        self._lease_s = lease_s
        self._renewed_at = float("-inf")
        self._new_here = True
        self.look_every_s = lease_s / _LOOKS
        self._leader: Leader | None = None
        self._fence: Fence | None = None

    @property
    def leads(self) -> bool:
        """Tell whether this manager has the lead, as far as it knows."""
        return self._fence is not None

    @property
    def fence(self) -> Fence:
        """What the leader's transactions stand behind.

        Raises:
            Fenced: this manager does not lead.

        """
        if self._fence is None:
            raise Fenced(f"{self._me.url} does not lead, or not any more")
        return self._fence

    @property
    def other(self) -> Leader | None:
        """Return the other manager that led at the last look."""
        known = self._leader is not None and self._leader.manager != self._me.manager
        return self._leader if known else None

    async def take(self) -> bool:
        """Take the lead under a new epoch, unless somebody else has it; tell whether it was taken."""
        self._fence = None
        (held,) = await self._bus.holders([names.MANAGER_LEASE])
        self._leader = None if held is None else Leader.model_validate_json(held)
        if self._leader is not None and not self._may_replace(self._leader):
            self._new_here = False
            return False
        taken = await self._bus.take(
            names.MANAGER_LEASE,
            self._value,
            max(self._lease_s, RECOVERY_LEASE_S),
            epoch=names.MANAGER_EPOCH,
            instead_of=held,
        )
        if taken is None:
            return False
        self._new_here = False
        self._renewed_at = float("-inf")
        self._leader, self._fence = self._me, Fence(names.MANAGER_EPOCH, taken)
        log.info("leads", epoch=taken, url=self._me.url)
        return True

    def _may_replace(self, leader: Leader) -> bool:
        # A process that has bound the leader's address is its successor: the leader is dead. Believed once in a life,
        # so that two which share an address by mistake do not take the lead from each other for ever.
        return leader.manager == self._me.manager or (self._new_here and leader.address == self._me.address)

    def renewal(self, now: float) -> list[Op]:
        """Return what keeps the lease, when it is time; for a transaction behind the fence, or it would be theft."""
        if now - self._renewed_at < self._lease_s / _RENEWALS:
            return []
        self._renewed_at = now
        return [Renew(names.MANAGER_LEASE, self._value, self._lease_s)]

    def doubt(self, fence: Fence) -> None:
        """Lead no longer behind this fence, until the lead is taken again: a write had no answer, or was refused."""
        if self._fence == fence:
            self._fence = None

    async def resign(self) -> None:
        """Give the lease back, so that a standby need not wait for its end."""
        if self._fence is None:
            return
        fence, self._fence, self._leader = self._fence, None, None
        try:
            await self._bus.transact([Delete(names.MANAGER_LEASE)], fence)
        except (BusUnavailable, Fenced) as error:
            log.warning("lease_not_given_back", error=str(error))
