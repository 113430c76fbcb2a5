"""The manager's one loop.

Consumes: jobs' commands and reports, requested groups, the token log, beats, committed weights.
Produces: records of the token log, workers' commands, finished samples, events; each turn in one transaction with the
    positions up to which the streams were read.
Waits for: the next entry, or the next tick; as a standby, for the end of the leader's lease.
Ends when: the stop is set. When Redis does not answer it is unknown what took place, so the lead is taken anew and the
    world rebuilt from the log when Redis is back; that is also how a new manager begins. When another manager has
    taken the lead, nothing that this one writes takes place: it forgets its world and becomes a standby.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import structlog

from services.rollout_manager.carry_out import bookkeeping, operations
from services.rollout_manager.domain import actions
from services.rollout_manager.domain.compaction import compact, forget_ended
from services.rollout_manager.domain.decide import decide
from services.rollout_manager.domain.intake import take, take_frames
from services.rollout_manager.domain.world import Now, World
from services.rollout_manager.leadership import LEASE_S, Leader, Leadership, manager_at
from services.rollout_manager.recovery import SHARED_STREAMS, recover
from services.rollout_manager.runs import apply
from services.rollout_manager.serving import Desk
from shared import names
from shared.bus import START, Bus, Entry, Op, Trim, after
from shared.errors import BusUnavailable, Fatal, Fenced
from shared.lifecycle import until_stop

log = structlog.get_logger(__name__)

BLOCK_S = 0.05
"""Longest wait for an entry: the time between two ticks when nothing happens."""
TURN_S = 0.01
"""Shortest turn: what arrives within it is handled together."""
TRIM_EVERY_S = 1.0
BATCH = 1024


class Manager:
    """Reads, decides, writes; `world` is what the REST API shows."""

    TRIMMED_WHEN_READ: ClassVar[frozenset[str]] = frozenset({names.JOB_REPORTS, names.WORKER_BEATS})

    def __init__(
        self,
        bus: Bus,
        *,
        lease_s: float,
        redis_limit_s: float,
        clock: Callable[[], Now] | None = None,
        me: Leader | None = None,
        leader_lease_s: float = LEASE_S,
    ) -> None:
        """Prepare; the world is empty until it is recovered.

        Args:
            bus: the broker.
            lease_s: a worker not heard for so long, and without a lease, is lost.
            redis_limit_s: how long to try again when Redis does not answer.
            clock: the current moment; the system's clocks when None.
            me: as the lease names this manager; managers that may lead at once need different addresses.
            leader_lease_s: how long a leading manager may be silent until another takes over.

        """
        self._bus = bus
        self._now = clock or _now
        self._lease_s = lease_s
        self._redis_limit_s = redis_limit_s
        self._leadership = Leadership(bus, me or manager_at("", 0, ""), leader_lease_s)
        self.world = World(lease_s)
        self.desk = Desk()
        self.recovered = False
        self._cursors: dict[str, str] = {}
        self._audit_texts: dict[str, str] = {}
        self._over: list[str] = []
        """Streams that need no cursor any more."""
        self._trimmed_at = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Manage until the stop, or stand by."""
        away_since: float | None = None
        while not stop.is_set():
            try:
                if not self.recovered and not await self.try_lead():
                    away_since = None
                    await until_stop(stop, self._leadership.look_every_s)
                    continue
                away_since = None
                began = time.monotonic()
                await self.turn(BLOCK_S)
                await until_stop(stop, max(0.0, TURN_S - (time.monotonic() - began)))
            except Fenced as error:
                self._forget(str(error))
            except BusUnavailable as error:
                self.recovered = False
                away_since = away_since or time.monotonic()
                away_s = time.monotonic() - away_since
                if away_s > self._redis_limit_s:
                    raise Fatal(
                        f"{error}; gave up after {away_s:.0f} s: start Redis, then start the manager"
                    ) from error
                log.warning("redis_away", error=str(error), away_s=round(away_s, 1))
                await until_stop(stop, 0.5)
        self.recovered = False
        self.desk.close("this manager stops")
        await self._leadership.resign()

    @property
    def leads(self) -> bool:
        """Tell whether this manager leads and knows the world."""
        return self.recovered and self._leadership.leads

    @property
    def other_leader(self) -> Leader | None:
        """Return who leads in this one's place, None when nobody does that it knows of."""
        return self._leadership.other

    async def try_lead(self) -> bool:
        """Take the lead and rebuild the world, unless another manager leads; tell whether this one does now.

        Raises:
            Fenced: another took the lead meanwhile.
            BusUnavailable: it is unknown who leads: try again.

        """
        self.recovered = False
        if not await self._leadership.take():
            if self._cursors:
                self._forget("another has taken the lead while it was in doubt")
            return False
        recovered = await recover(self._bus, self._lease_s, self._now())
        self.world, self._cursors = recovered.world, recovered.cursors
        self._audit_texts.clear()
        # The cursors of this fold are stored at once: what it counted must not be counted again.
        await self._commit(dict(self._cursors))
        self.recovered = True
        return True

    async def recover(self) -> None:
        """Take the lead and rebuild the world.

        Raises:
            Fenced: another manager leads.
            BusUnavailable: it is unknown who leads: try again.

        """
        if not await self.try_lead():
            raise Fenced("another manager leads: wait for the end of its lease")

    def _forget(self, why: str) -> None:
        self.recovered = False
        self.world = World(self._lease_s)
        self._cursors.clear()
        self._audit_texts.clear()
        self.desk.close(why)
        log.warning("superseded", reason=why)

    async def write(self, ops: Sequence[Op]) -> None:
        """Carry out what a client asks for, as the leader.

        Raises:
            Fenced: this manager does not lead (any more); nothing took place.
            BusUnavailable: it is unknown whether it took place.

        """
        fence = self._leadership.fence
        try:
            await self._bus.transact(ops, fence)
        except (BusUnavailable, Fenced):
            self._leadership.doubt(fence)  # the loop finds out at its next commit
            raise

    async def turn(self, block_s: float = 0.0) -> None:
        """Read what is there, waiting up to `block_s` for the first entry; decide; write."""
        entries = await self._bus.read(self._cursors, count=BATCH, block_s=block_s)
        now = self._now()
        self._take(entries, now)
        suspects = self.world.fleet.suspects(now.mono)
        holders = await self._bus.holders([names.worker_lease(worker) for worker in suspects])
        dead = [worker for worker, holder in zip(suspects, holders, strict=True) if holder is None]
        decide(self.world, now, dead, self.desk.clients)
        advanced = {entry.stream: self._cursors[entry.stream] for entry in entries}
        trims: list[Op] = []
        if now.mono - self._trimmed_at > TRIM_EVERY_S:
            self._trimmed_at = now.mono
            trims = self._trims()
            self._forget_ended(now)
        await self._commit(advanced, trims)
        self.desk.ring(self.world)
        self._follow_jobs()

    def _take(self, entries: list[Entry], now: Now) -> None:
        world = self.world
        self._cursors.update((entry.stream, entry.id) for entry in entries)
        for entry, error in apply(
            sorted(entries, key=_apply_order),
            lambda frames: take_frames(world, frames),
            lambda entry: take(world, entry.message, entry.id, now),
        ):
            log.warning("buried", stream=entry.stream, entry=entry.id, reason=str(error))
            world.actions.append(actions.Bury(entry.stream, entry.id, entry.message, str(error)))

    async def _commit(self, advanced: dict[str, str], trims: list[Op] | None = None) -> None:
        changed = {}
        for job_id, audit in self.world.audits.items():
            text = audit.model_dump_json()
            if self._audit_texts.get(job_id) != text:
                self._audit_texts[job_id] = text
                changed[job_id] = audit
        over, self._over = self._over, []
        decided = self.world.take_actions()
        ops = [*operations(decided), *bookkeeping(advanced, changed, over), *(trims or ())]
        ops += self._leadership.renewal(self._now().mono)
        await self._bus.transact(ops, self._leadership.fence)
        self.desk.refuse(decided)

    def _forget_ended(self, now: Now) -> None:
        forget_ended(self.world, now.wall)
        for job_id in self._audit_texts.keys() - self.world.audits.keys():
            del self._audit_texts[job_id]

    def _follow_jobs(self) -> None:
        """Read the requests of active jobs, and no others."""
        wanted = {names.rollouts_requested(job.id) for job in self.world.active_jobs()}
        for stream in wanted - self._cursors.keys():
            self._cursors[stream] = START
        for stream in self._cursors.keys() - wanted - set(SHARED_STREAMS):
            del self._cursors[stream]
            self._over.append(stream)

    def _trims(self) -> list[Op]:
        oldest = compact(self.world, self._cursors[names.TOKEN_LOG])
        trims: list[Op] = [Trim(names.TOKEN_LOG, oldest)]
        for stream, cursor in self._cursors.items():
            if stream in self.TRIMMED_WHEN_READ or stream not in SHARED_STREAMS:
                trims.append(Trim(stream, after(cursor)))
        return trims


def _apply_order(entry: Entry) -> int:
    # Requests come before the log, beats last: a beat that says "suspended" follows the frames flushed before it.
    if entry.stream == names.WORKER_BEATS:
        return 3
    return {names.TOKEN_LOG: 2}.get(entry.stream, 0 if entry.stream in SHARED_STREAMS else 1)


def _now() -> Now:
    return Now(time.monotonic(), time.time())
