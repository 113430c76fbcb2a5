"""A lease on a prefix of an object store: one process at a time writes to it.

The holder renews the lease by a conditional write of `owner.json` over its own last version. A process that finds
another owner waits for the lease time that is in the document. If the document changed meanwhile, its owner is alive
and the process gives up; otherwise it overwrites the document. Clocks of two machines are never compared.

A paused holder finds its lease expired, stops writing, and is fenced at its next conditional write. All documents are
written conditionally, so its late writes have no effect. Removals are unconditional: they are cancelled when the lease
expires, some time before the next holder may start. A holder that is paused for that whole time between the check and
the request could still remove chunks that were garbage during its own lease.
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

from rlboost.shared.bucket import Bucket, Changed, ExclusiveObject, StoredObject
from rlboost.shared.errors import ConfigError, Fenced, NotFound, Retryable, StoreUnavailable
from rlboost.shared.ids import new_token
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.waiting import Waits

log = structlog.get_logger(__name__)

_PATH = "owner.json"
_SPARE_S = 60.0
"""Extra time, beyond the lease, for reading the owner document."""


class _Owner(BaseModel):
    model_config = ConfigDict(frozen=True)

    owner: str
    """Host and process id, for error messages."""
    run: str
    """Distinguishes runs of a process."""
    renewed: int
    """Number of renewals."""
    lease_s: float
    """Without a change for this time the owner counts as dead; 0 after a release."""


class Lease:
    """The exclusive right to write to a bucket; the loop `hold` renews it.

    `hold` consumes nothing and produces a renewal every third of the lease time. It waits for the object store, and
    ends at the stop, or with `Fenced` when another process has taken over.
    """

    def __init__(self, bucket: Bucket, document: ExclusiveObject, lease_s: float) -> None:
        """Use `acquire`."""
        self._bucket = bucket
        self._object = document
        self._lease_s = lease_s
        self._run = new_token(8)
        self._renewed = 0
        self._valid_until = 0.0

    @classmethod
    async def acquire(cls, bucket: Bucket, lease_s: float, waits: Waits) -> Self:
        """Acquire the lease; wait for the lease of a previous process to expire.

        Raises:
            ConfigError: another process holds the lease, or the server ignores write conditions.
            StoreUnavailable: the object store does not answer.

        """
        found = await _read(bucket)
        if found is not None:
            found = await _wait_until_expired(bucket, found, waits)
        lease = cls(bucket, ExclusiveObject(bucket, _PATH, found.version if found else None), lease_s)
        try:
            await lease._renew()
        except Fenced as error:
            raise ConfigError(f"object store {bucket.url} is in use by another process: {_ADVICE}") from error
        await lease._check_conditions()
        return lease

    def check(self) -> None:
        """Check that this process holds the lease.

        Raises:
            StoreUnavailable: the lease has expired; it may be renewed soon.

        """
        if not_ready_reason := self.not_ready_reason():
            raise StoreUnavailable(not_ready_reason)

    @asynccontextmanager
    async def within_lease(self) -> AsyncIterator[None]:
        """Cancel the body when the current lease expires.

        Raises:
            StoreUnavailable: the lease has expired, or expired during the body.

        """
        self.check()
        try:
            async with asyncio.timeout(self._valid_until - time.monotonic()):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(f"object store {self._bucket.url} did not answer within the lease") from error

    def not_ready_reason(self) -> str | None:
        """Return why this process may not write now, None if it may."""
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
                log.warning("lease_renewal_failed", store=self._bucket.url, error=str(error) or "no answer in time")
            await until_stop(stop, interval_s)

    async def release(self) -> None:
        """Release the lease, so that the next process need not wait, if the object store answers."""
        self._valid_until = 0.0
        try:
            async with asyncio.timeout(self._lease_s / 3):
                await self._object.write(self._document(0.0))
        except (Retryable, Fenced, TimeoutError) as error:
            log.warning("lease_release_failed", store=self._bucket.url, error=str(error) or "no answer in time")

    async def _renew(self) -> None:
        began = time.monotonic()
        self._renewed += 1
        await self._object.write(self._document(self._lease_s))
        # The next holder waits for the whole lease time.
        self._valid_until = began + self._lease_s * 2 / 3

    async def _check_conditions(self) -> None:
        try:
            await self._bucket.put_if_version(_PATH, self._document(self._lease_s), None)
        except Changed:
            return
        raise ConfigError(
            f"object store {self._bucket.url}: its server ignores conditional writes (If-None-Match: *), "
            "so two weight stores could corrupt it: use an object store that supports them"
        )

    def _document(self, lease_s: float) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        return _Owner(owner=owner, run=self._run, renewed=self._renewed, lease_s=lease_s).model_dump_json().encode()


_ADVICE = "stop it, or give each weight store its own prefix"


async def _read(bucket: Bucket) -> StoredObject | None:
    try:
        return await bucket.get(_PATH)
    except NotFound:
        return None


async def _wait_until_expired(bucket: Bucket, found: StoredObject, waits: Waits) -> StoredObject | None:
    """Wait until the lease of `found` has expired; return the current document."""
    holder = _decoded(bucket, found)
    if holder.lease_s == 0:
        return found
    log.info("lease_awaited", store=bucket.url, holder=holder.owner, lease_s=holder.lease_s)
    because = f"start on {bucket.url}"
    async with waits.on(f"the lease of {holder.owner}", because=because, limit_s=holder.lease_s + _SPARE_S):
        await asyncio.sleep(holder.lease_s)
        now = await _read(bucket)
    if now is not None and now.data != found.data and (living := _decoded(bucket, now)).lease_s:
        raise ConfigError(f"object store {bucket.url} is in use by {living.owner}: {_ADVICE}")
    return now


def _decoded(bucket: Bucket, found: StoredObject) -> _Owner:
    try:
        return _Owner.model_validate_json(found.data)
    except ValidationError as error:
        raise ConfigError(
            f"object store {bucket.url}: {_PATH} was not written by a weight store: use another prefix"
        ) from error
