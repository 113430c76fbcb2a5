"""A lease in Redis that fences its holder: once another process has acquired it, no write of the holder takes effect.

A lease alone is not safe: its holder may be paused for longer than the lease lasts, resume in the middle of a write and
not notice. So acquiring the lease also increments an epoch, atomically, and every transaction of the holder is fenced
by its own epoch. A lease that has expired stays usable until another holder acquires it, and only the clock of Redis
matters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rlboost.shared.errors import Fenced
from rlboost.shared.streams.bus import Bus, Delete, Fence, Op, Renew


class FencedLease:
    """One candidate's view of one lease. Whether it is held is as of the last acquisition or refused write."""

    def __init__(self, bus: Bus, key: str, epoch_key: str, ttl_s: float) -> None:
        """Create a lease that is not held.

        Args:
            bus: the broker.
            key: the lease; its value identifies the holder.
            epoch_key: a counter, incremented by each acquisition; it never expires.
            ttl_s: how long the lease lasts without a renewal, by the broker's clock.

        """
        self._bus = bus
        self._key = key
        self._epoch_key = epoch_key
        self._ttl_s = ttl_s
        self._fence: Fence | None = None
        self._attempted: str | None = None
        """The value of the last acquisition, which may have taken effect although its reply was lost."""

    @property
    def fence(self) -> Fence | None:
        """Return the fence for the holder's transactions, None while the lease is not held."""
        return self._fence

    @property
    def is_held(self) -> bool:
        """Return True if this candidate holds the lease, as far as it knows."""
        return self._fence is not None

    @property
    def epoch(self) -> int | None:
        """Return the epoch under which the lease is held, None while it is not."""
        return None if self._fence is None else self._fence.epoch

    async def holder(self) -> str | None:
        """Return the lease's value, regardless of its holder; None if it is free."""
        (value,) = await self._bus.cap_and_read_leases([self._key])
        return value

    async def acquire(
        self,
        value: str,
        *,
        replacing: str | None = None,
        ttl_s: float | None = None,
        confirm: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Acquire the lease under a new epoch if it is free; return True if it is held afterwards.

        The value of the last attempt, whose reply may have been lost, counts as free, too.

        Args:
            value: identifies this holder.
            replacing: another holder's value that may be overwritten.
            ttl_s: how long the lease lasts until its first renewal; the usual time when None.
            confirm: called after the acquisition and before the lease counts as held; False gives it back.

        Raises:
            BusUnavailable: it is unknown whether the lease was acquired: call again.

        """
        self._fence = None
        replacing, self._attempted = replacing or self._attempted, value
        epoch = await self._bus.acquire_fenced(
            self._key, value, ttl_s or self._ttl_s, epoch=self._epoch_key, replacing=replacing
        )
        if epoch is None:
            return False
        fence = Fence(self._epoch_key, epoch)
        if confirm is not None and not await confirm():
            await self._bus.transact(self.release_ops(forget_epoch=True), fence)
            return False
        self._fence = fence
        return True

    def renewal(self, value: str, *, ttl_s: float | None = None) -> Op:
        """Return the operation that renews the lease for `ttl_s` or the usual time, for a transaction under `fence`."""
        return Renew(self._key, value, ttl_s or self._ttl_s)

    async def renew(self, value: str, ops: Sequence[Op] = ()) -> None:
        """Renew the lease, and apply `ops` in the same transaction.

        Raises:
            Fenced: the lease is not held, or another holder has acquired it; nothing was written.
            BusUnavailable: it is unknown whether the transaction took effect.

        """
        if self._fence is None:
            raise Fenced(f"{self._key} is not held: acquire it first")
        await self._bus.transact([self.renewal(value), *ops], self._fence)

    def invalidate(self, fence: Fence | None = None) -> None:
        """Count the lease as not held: a write had no reply, or was refused.

        Args:
            fence: the write's fence; no effect if the lease has been acquired again since. None: in any case.

        """
        if fence is None or self._fence == fence:
            self._fence = None

    def release_ops(self, *, forget_epoch: bool = False) -> list[Op]:
        """Return the operations that free the lease, for a transaction under `fence`.

        Args:
            forget_epoch: also delete the counter, when nothing will ever be written under this lease again.

        """
        return [Delete(self._key), *([Delete(self._epoch_key)] if forget_epoch else [])]

    async def release(self) -> None:
        """Free the lease, so that the next holder need not wait until it expires; no effect if it is not held.

        Raises:
            Fenced: another holder has acquired it already.
            BusUnavailable: it may not have been freed; it expires by itself.

        """
        if self._fence is not None:
            fence, self._fence = self._fence, None
            await self._bus.transact(self.release_ops(), fence)
