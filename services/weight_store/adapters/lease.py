"""One process at a time writes to a prefix of an object store, as `exclusive.hold` does for a folder.

The holder writes `owner.json` again and again, each time over its own last version. Who finds another's document waits
for as long as that one says: if it was written meanwhile, its writer lives, and the newcomer gives up. If not, the
newcomer writes over it. No two clocks are compared. A holder that was thought dead and comes back finds its lease
spent, does nothing more, and at its next write learns that it was succeeded. What it had sent before cannot harm: each
document is written conditionally. Only the removal of an object knows no condition. It is broken off when the lease
ends, some time before the next holder may begin; but a holder that is paused for all of that time between its last look
at the clock and the sending of a removal would still remove what was garbage in its own time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.bucket import Bucket, Changed, Found, Register
from shared.errors import ConfigError, Fenced, NotFound, Retryable, StoreUnavailable
from shared.ids import new_token
from shared.lifecycle import until_stop
from shared.waiting import Waits

log = structlog.get_logger(__name__)

_PATH = "owner.json"
_SPARE_S = 60.0
"""How long reading another's document may take beyond its lease."""


class _Owner(BaseModel):
    model_config = ConfigDict(frozen=True)

    owner: str
    """Who it is, for people: host and process id."""
    run: str
    """Tells one run of a process from the next."""
    renewed: int
    """How often."""
    lease_s: float
    """Unchanged for so long, its writer counts as dead; 0 once it has left."""


class Lease:
    """The right to write to a bucket, to be renewed by the loop `hold`."""

    def __init__(self, bucket: Bucket, register: Register, lease_s: float) -> None:
        """Hold nothing yet: use `take`."""
        self._bucket = bucket
        self._register = register
        self._lease_s = lease_s
        self._run = new_token(8)
        self._renewed = 0
        self._valid_until = 0.0

    @classmethod
    async def take(cls, bucket: Bucket, lease_s: float, waits: Waits) -> Self:
        """Take the lease, after waiting for that of a process that may have died.

        Raises:
            ConfigError: another process uses the bucket, or the server does not keep to conditional writes.
            StoreUnavailable: the object store does not answer.

        """
        found = await _read(bucket)
        if found is not None:
            found = await _outlived(bucket, found, waits)
        lease = cls(bucket, Register(bucket, _PATH, found.version if found else None), lease_s)
        try:
            await lease._renew()
        except Fenced as error:
            raise ConfigError(f"object store {bucket.url} is in use by another process: {_ADVICE}") from error
        await lease._check_conditions()
        return lease

    def check(self) -> None:
        """Make sure that this process may write, and may promise.

        Raises:
            StoreUnavailable: the lease is spent; it may be renewed soon.

        """
        if lack := self.lack():
            raise StoreUnavailable(lack)

    @asynccontextmanager
    async def limiting(self) -> AsyncIterator[None]:
        """Break the body off when the lease ends, as it is now.

        Raises:
            StoreUnavailable: the lease is spent, or was before the body was done.

        """
        self.check()
        try:
            async with asyncio.timeout(self._valid_until - time.monotonic()):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(f"object store {self._bucket.url} did not answer within the lease") from error

    def lack(self) -> str | None:
        """Return why this process may not write just now, None when it may."""
        if time.monotonic() < self._valid_until:
            return None
        return f"the lease on object store {self._bucket.url} could not be renewed in time"

    async def hold(self, stop: asyncio.Event) -> None:
        """Renew the lease until the stop.

        Raises:
            Fenced: another process has taken over.

        """
        interval_s = self._lease_s / 3
        while not stop.is_set():
            try:
                async with asyncio.timeout(interval_s):
                    await self._renew()
            except (Retryable, TimeoutError) as error:
                log.warning("lease_not_renewed", store=self._bucket.url, error=str(error) or "no answer in time")
            await until_stop(stop, interval_s)

    async def release(self) -> None:
        """Let the next process begin at once, if the object store answers."""
        self._valid_until = 0.0
        try:
            async with asyncio.timeout(self._lease_s / 3):
                await self._register.write(self._document(0.0))
        except (Retryable, Fenced, TimeoutError) as error:
            log.warning("lease_not_given_back", store=self._bucket.url, error=str(error) or "no answer in time")

    async def _renew(self) -> None:
        began = time.monotonic()
        self._renewed += 1
        await self._register.write(self._document(self._lease_s))
        # The next holder waits for the whole of it.
        self._valid_until = began + self._lease_s * 2 / 3

    async def _check_conditions(self) -> None:
        try:
            await self._bucket.put_over(_PATH, self._document(self._lease_s), None)
        except Changed:
            return
        raise ConfigError(
            f"object store {self._bucket.url}: its server does not keep to conditional writes (If-None-Match: *), "
            "so two weight stores could not be kept apart: use one that does"
        )

    def _document(self, lease_s: float) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        return _Owner(owner=owner, run=self._run, renewed=self._renewed, lease_s=lease_s).model_dump_json().encode()


_ADVICE = "stop it, or give each weight store a prefix of its own"


async def _read(bucket: Bucket) -> Found | None:
    try:
        return await bucket.get(_PATH)
    except NotFound:
        return None


async def _outlived(bucket: Bucket, found: Found, waits: Waits) -> Found | None:
    """Return what is there when the writer of `found` is surely gone."""
    holder = _decoded(bucket, found)
    if holder.lease_s == 0:
        return found
    log.info("waiting_for_lease", store=bucket.url, holder=holder.owner, lease_s=holder.lease_s)
    because = f"start on {bucket.url}"
    async with waits.on(f"the lease of {holder.owner}", because=because, limit_s=holder.lease_s + _SPARE_S):
        await asyncio.sleep(holder.lease_s)
        now = await _read(bucket)
    if now is not None and now.data != found.data and (living := _decoded(bucket, now)).lease_s:
        raise ConfigError(f"object store {bucket.url} is in use by {living.owner}: {_ADVICE}")
    return now


def _decoded(bucket: Bucket, found: Found) -> _Owner:
    try:
        return _Owner.model_validate_json(found.data)
    except ValidationError as error:
        raise ConfigError(
            f"object store {bucket.url}: {_PATH} is not a weight store's: give it a prefix of its own"
        ) from error
