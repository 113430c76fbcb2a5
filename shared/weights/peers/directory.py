"""The directory: which peers are there, where, and what they hold; leases in Redis, so that nobody stays for ever.

It is a hint: a peer that is not there costs an attempt, and no byte is believed before it has its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shared.bus import Bus, Delete, HashDelete, HashSet, Renew
from shared.names import WEIGHT_PEERS, weight_claim, weight_peer

log = structlog.get_logger(__name__)

LEASE_S = 15.0
"""How long a peer stays listed that no longer says so."""
CLAIM_S = 5.0
"""How long others leave a blob to the peer that fetches it from the weight store, unless it says so again."""


class Peer(BaseModel):
    """One worker that serves what it holds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+$")]
    host: str
    """Name of its machine: an address that means only the machine itself is of use there alone."""
    holds: dict[str, str] = Field(default_factory=dict)
    """Catalogue id -> marks: see `catalogue`."""

    @property
    def is_loopback(self) -> bool:
        """Tell whether the address means only its own machine."""
        return self.url.startswith(("http://127.", "http://localhost:", "http://[::1]"))


class Directory:
    """The directory as one peer sees it. Every method raises `BusUnavailable` when Redis is away."""

    def __init__(self, bus: Bus, name: str, host: str) -> None:
        """Use an open bus; `name` is this peer's, of this process alone."""
        self._bus = bus
        self._name = name
        self._host = host

    async def tell(self, url: str, holds: Mapping[str, str]) -> None:
        """Say for `LEASE_S` seconds more what this peer holds and where."""
        record = Peer(name=self._name, url=url, host=self._host, holds=dict(holds)).model_dump_json()
        lease = Renew(weight_peer(self._name), record, LEASE_S)
        await self._bus.transact([HashSet(WEIGHT_PEERS, {self._name: ""}), lease])

    async def withdraw(self) -> None:
        """Leave the directory."""
        await self._bus.transact([HashDelete(WEIGHT_PEERS, (self._name,)), Delete(weight_peer(self._name))])

    async def look(self) -> list[Peer]:
        """Return the other peers that can be reached from here."""
        return [
            peer
            for peer in await listed(self._bus)
            if peer.name != self._name and (peer.host == self._host or not peer.is_loopback)
        ]

    async def claim(self, digest: str) -> bool:
        """Say that this peer fetches a blob from the weight store; tell whether it is the one that does."""
        (ours,) = await self._bus.acquire([weight_claim(digest)], self._name, CLAIM_S)
        return ours

    async def keep_claim(self, digest: str) -> None:
        """Say it again."""
        await self._bus.renew(weight_claim(digest), self._name, CLAIM_S)

    async def drop_claim(self, digest: str) -> None:
        """Leave the blob to another one."""
        await self._bus.transact([Delete(weight_claim(digest))])


async def listed(bus: Bus) -> list[Peer]:
    """Return all peers whose lease holds, and strike off the others. Raises `BusUnavailable`."""
    names = list(await bus.hash_all(WEIGHT_PEERS))
    records = await bus.holders([weight_peer(name) for name in names])
    gone = tuple(name for name, record in zip(names, records, strict=True) if record is None)
    if gone:
        await bus.transact([HashDelete(WEIGHT_PEERS, gone)])
    return _decoded([record for record in records if record is not None])


def _decoded(records: Sequence[str]) -> list[Peer]:
    peers = []
    for record in records:
        try:
            peers.append(Peer.model_validate_json(record))
        except ValidationError as error:
            log.warning("peer_record_unreadable", error=str(error))
    return peers
