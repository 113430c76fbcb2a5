"""The peer directory: which workers serve blobs, their URLs, and what they hold. Entries are leases in Redis.

Each worker writes its own entry; the manager maintains the list of workers that may have one. The directory is a hint:
an entry of a dead peer costs one failed attempt, and every blob is digest-checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rlboost.shared.streams.bus import Bus, Delete, Renew, WrongType
from rlboost.shared.streams.names import WEIGHT_PEERS, weight_claim, weight_peer

log = structlog.get_logger(__name__)

LEASE_S = 15.0
"""How long an entry stays without a renewal."""
CLAIM_S = 5.0
"""How long a claim on a blob lasts without a renewal: of its site, the claimant alone fetches it from the store."""


def _with_valid_address(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError if the host is an invalid IPv6 address, and `port` if it is no number
    if not parts.hostname or parts.port == 0:
        raise ValueError("it is not of the form http://HOST:PORT")
    return url


class Peer(BaseModel):
    """One worker that serves its cache."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+$"), AfterValidator(_with_valid_address)]
    host: str
    """Name of its machine: a loopback address is usable on the same machine only."""
    site: str = ""
    """Where its machine is; empty: where the weight store is. Only workers of one site ask each other."""
    holds: dict[str, str] = Field(default_factory=dict)
    """`BlobIndex.id` -> bitmap of the blobs it holds."""

    @property
    def is_loopback(self) -> bool:
        """Return True if only the same machine can reach the address."""
        return self.url.partition("://")[2].startswith(("127.", "localhost:", "[::1]"))


class PeerDirectory:
    """The peer directory as one peer uses it. Every method raises `BusUnavailable` while Redis is unavailable."""

    def __init__(self, bus: Bus, name: str, host: str, site: str = "") -> None:
        """Use an open bus; `name` is the worker's id."""
        self._bus = bus
        self._name = name
        self.host = host
        """See `Peer.host`."""
        self.site = site
        """See `Peer.site`."""

    def use(self, bus: Bus, name: str) -> None:
        """Continue with another bus, as another incarnation of the worker."""
        self._bus, self._name = bus, name

    async def publish(self, url: str, holds: Mapping[str, str]) -> None:
        """Publish this peer's URL and holdings for another `LEASE_S` seconds."""
        peer = Peer(name=self._name, url=url, host=self.host, site=self.site, holds=dict(holds))
        await self._bus.transact([Renew(weight_peer(self._name), peer.model_dump_json(), LEASE_S)])

    async def withdraw(self) -> None:
        """Remove this peer's entry."""
        await self._bus.transact([Delete(weight_peer(self._name))])

    async def peers(self) -> list[Peer]:
        """Return the other peers of this site that this machine can reach."""
        return [
            peer
            for peer in await list_peers(self._bus)
            if peer.name != self._name and peer.site == self.site and (peer.host == self.host or not peer.is_loopback)
        ]

    async def claim(self, digest: str) -> bool:
        """Claim the fetch of a blob from the weight store; return True if this peer got its site's claim."""
        return await self._bus.acquire(weight_claim(digest, self.site), self._name, CLAIM_S)

    async def renew_claim(self, digest: str) -> None:
        """Extend a claim that this peer holds."""
        await self._bus.transact([Renew(weight_claim(digest, self.site), self._name, CLAIM_S)])

    async def release_claim(self, digest: str) -> None:
        """Release the claim, so that another peer may fetch the blob."""
        await self._bus.transact([Delete(weight_claim(digest, self.site))])


async def list_peers(bus: Bus) -> list[Peer]:
    """Return the workers with a valid lease; none while a worker has replaced their list. Raises `BusUnavailable`."""
    try:
        names = list(await bus.hash_all(WEIGHT_PEERS))
    except WrongType as error:
        log.warning("peer_list_unreadable", error=str(error))
        return []
    records = await bus.lease_values([weight_peer(name) for name in names])
    return [peer for name, record in zip(names, records, strict=True) if record and (peer := _decoded(name, record))]


def _decoded(name: str, record: str) -> Peer | None:
    try:
        peer = Peer.model_validate_json(record)
    except ValidationError as error:
        log.warning("peer_record_unreadable", peer=name, error=str(error))
        return None
    return peer if peer.name == name else None
