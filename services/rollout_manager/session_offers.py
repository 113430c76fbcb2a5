"""Sessions of remote agents: hosts take them, keep them by renewing a lease, and end them with a reward.

The trainer offers a session by its field in the hash `names.job_offers`, and stores what a host gets with the session.
Only the leading manager writes who runs it: each write is one transaction under its fence, so a session has one host,
and one end. A host that vanishes loses its lease, and the session is offered again as another start of its agent; that
start's calls find the turns of the one before.

Consumes: requests of hosts, and what Redis has of the offered sessions.
Produces: leases, and a `SessionRewarded` for the trainer in one transaction with the end of the offer.
Waits for: the next offer, for as long as a host wants to.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.http.problem import Problem
from rlboost.shared.job.agent import (
    LEASED,
    REWARDED,
    SESSION,
    TASK,
    Offer,
    SessionId,
    SessionRecord,
    SessionTask,
    key_of_start,
    session_key,
)
from rlboost.shared.messages import SessionRewarded
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, HashDelete, HashSet, Op

LEASE_S = 30.0
"""How long a host may be silent until its sessions are offered again."""
MAX_STARTS = 4
"""Of the agent of one session whose hosts vanish: a session may be what kills them."""
POLL_S = 0.25
"""How often offers are read while a host waits for one."""


class Named(NamedTuple):
    """One start of a session's agent, as its host names it."""

    sample: int
    start: str

    @classmethod
    def parse(cls, text: str) -> Named:
        """Invert `str`; raises ValueError if it is not one."""
        sample, _, start = text.partition(".")
        return cls(int(sample, 16), start)

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.sample:x}.{self.start}"


class SessionOffers:
    """The offered sessions of all jobs."""

    def __init__(self, manager: Manager, bus: Bus, token: str, clock: Callable[[], float] = time.time) -> None:
        """Serve while the manager leads.

        Args:
            manager: writes as the leader.
            bus: reads.
            token: signs the keys of sessions.
            clock: Unix seconds.

        """
        self._manager, self._bus, self._token, self._clock = manager, bus, token, clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._led: tuple[World | None, float] = (None, 0.0)
        """The world of this leadership, and since when it is."""
        self._parsed: dict[str, tuple[str, Offer]] = {}
        """Field of an offer -> its text and what that says, as of the last read."""

    def _lock(self, job_id: str) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())

    # --- taking ---

    async def wait(
        self, job: Job, n: int, wait_s: float, is_disconnected: Callable[[], Awaitable[bool]]
    ) -> list[dict[str, Any]]:
        """Take up to `n` sessions; wait for the first, but not for a host that has gone.

        Raises:
            BusUnavailable: try again.
            Fenced: this manager does not lead.
            Problem: the job has ended.

        """
        limit = time.monotonic() + wait_s
        while True:
            if self._manager.world.jobs.get_active(job.id) is None:
                detail = f"job {job.id} has ended: it has no more sessions"
                raise Problem(410, "Job over", detail)
            async with self._lock(job.id):
                due = await self._due(job)
                if due and not await is_disconnected():
                    taken = await self._take(job, due[:n])
                    if taken:
                        return taken
            left_s = limit - time.monotonic()
            if left_s <= 0 or await is_disconnected():
                return []
            await asyncio.sleep(min(POLL_S, left_s))

    async def _due(self, job: Job) -> list[tuple[int, Offer]]:
        """Return the sessions that no host runs, earlier steps first."""
        stored = await self._bus.hash_all(names.job_offers(job.id))
        now, silent_since = self._clock(), self._silent_since()
        self._parsed = {
            field: known if (known := self._parsed.get(field)) and known[0] == text else (text, _offer(text))
            for field, text in stored.items()
        }
        found = [(int(field, 16), offer) for field, (_, offer) in self._parsed.items()]
        return sorted(
            (sample, offer) for sample, offer in found if max(offer.until, silent_since if offer.start else 0.0) <= now
        )

    def _silent_since(self) -> float:
        """Return when hosts that are silent since this manager leads have lost their leases."""
        world = self._manager.world
        if self._led[0] is not world:
            self._led = world, self._clock()
        return self._led[1] + LEASE_S

    async def _take(self, job: Job, due: Sequence[tuple[int, Offer]]) -> list[dict[str, Any]]:
        ops, taken = list[Op](), list[dict[str, Any]]()
        for sample, offer in due:
            session, field = SessionId(job.id, sample), f"{sample:x}"
            record, task, rewarded = await self._bus.hash_some(session.redis_key, [SESSION, TASK, REWARDED])
            opened = SessionRecord.model_validate_json(record) if record is not None else None
            if opened is None or opened.is_over or task is None or rewarded is not None or self._is_late(job, opened):
                ops.append(HashDelete(names.job_offers(job.id), (field,)))  # its trainer withdraws it, or has died
            elif offer.n_starts >= MAX_STARTS:
                detail = f"{offer.n_starts} hosts that ran it have vanished"
                ops += _end(session, SessionRewarded(session=sample, reason="crashed", detail=detail))
            else:
                given = SessionTask.model_validate_json(task)
                now, start = self._clock(), secrets.token_hex(4)
                made = Offer(
                    start=start, until=now + LEASE_S, expires_at=now + given.timeout_s, n_starts=offer.n_starts + 1
                )
                ops.append(HashSet(names.job_offers(job.id), {field: made.model_dump_json()}))
                ops.append(HashSet(session.redis_key, {LEASED: start}))
                taken.append(self._handed_out(session._replace(start=start), given, made))
        if ops:
            await self._manager.write(ops)
        return taken

    def _is_late(self, job: Job, record: SessionRecord) -> bool:
        """Return True if the weights that a session trains on are too old for it."""
        committed = self._manager.world.jobs.committed_version(job.id)
        return record.version + record.max_staleness < committed

    def _handed_out(self, session: SessionId, task: SessionTask, offer: Offer) -> dict[str, Any]:
        key = key_of_start(session_key(self._token, session), session.start)
        return {
            "id": str(Named(session.sample, session.start)),
            "session": session.subject,
            "base_url": f"{self._manager.url}/v1",
            "key": key,
            **task.model_dump(),
            "expires_at": offer.expires_at,
            "lease_s": LEASE_S,
        }

    # --- renewing ---

    async def renew(self, job: Job, given: Sequence[Named]) -> list[Named]:
        """Renew leases; return the ones that are over: their agents have nothing more to do.

        A session whose time is over ends.

        Raises:
            BusUnavailable: try again.
            Fenced: this manager does not lead.

        """
        over, ops, key = list[Named](), list[Op](), names.job_offers(job.id)
        if not given:
            return over
        async with self._lock(job.id):
            stored = await self._bus.hash_some(key, [f"{one.sample:x}" for one in given])
            now = self._clock()
            for one, text in zip(given, stored, strict=True):
                offer = _offer(text or "")
                if text is None or offer.start != one.start:
                    over.append(one)
                elif offer.expires_at <= now:
                    over.append(one)
                    detail = "its host did not end it in time"
                    rewarded = SessionRewarded(session=one.sample, start=one.start, reason="timeout", detail=detail)
                    ops += _end(SessionId(job.id, one.sample), rewarded)
                else:
                    renewed = offer.model_copy(update={"until": now + LEASE_S})
                    ops.append(HashSet(key, {f"{one.sample:x}": renewed.model_dump_json()}))
            if ops:
                await self._manager.write(ops)
        return over

    # --- rewards ---

    async def reward(self, session: SessionId, rewarded: SessionRewarded) -> None:
        """End a session; the same end again changes nothing.

        Raises:
            BusUnavailable: try again.
            Fenced: this manager does not lead.
            Problem: it is over, has another end, or another host has it.

        """
        async with self._lock(session.job_id):
            fields = [SESSION, LEASED, REWARDED]
            stored = dict(zip(fields, await self._bus.hash_some(session.redis_key, fields), strict=True))
            if text := stored[REWARDED]:
                if SessionRewarded.model_validate_json(text) != rewarded:
                    raise _over("this session has another reward, which counts: post one reward, once")
                return
            check_leased(stored, session)
            if stored[LEASED] is None:
                raise _over("this session's agent runs in the trainer: return the reward from its function")
            await self._manager.write(_end(session, rewarded))


def check_leased(stored: Mapping[str, str | None], session: SessionId) -> SessionRecord:
    """Return the record of a session that is open, and not taken by another host than that of the given start.

    Raises:
        Problem: 409, it is not.

    """
    text, leased = stored.get(SESSION), stored.get(LEASED)
    if text is None:
        raise _over("this session is not open: its step is over")
    record = SessionRecord.model_validate_json(text)
    if record.is_over or stored.get(REWARDED) is not None:
        raise _over("this session has ended")
    if leased is not None and leased != session.start:
        raise _over("the lease of this host has run out, and another one has the session: end its agent")
    return record


def _over(detail: str) -> Problem:
    return Problem(409, "Session over", detail)


def _end(session: SessionId, rewarded: SessionRewarded) -> list[Op]:
    return [
        Append(names.rollouts_finished(session.job_id), rewarded),
        HashSet(session.redis_key, {REWARDED: rewarded.model_dump_json()}),
        HashDelete(names.job_offers(session.job_id), (f"{session.sample:x}",)),
    ]


def _offer(text: str) -> Offer:
    return Offer.model_validate_json(text) if text else Offer()
