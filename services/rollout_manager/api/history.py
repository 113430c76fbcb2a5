"""Routes of a job's history: audit, metrics, samples, events, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from rlboost.services.rollout_manager.api.leader import OneJob, Routes, TheBus, TheManager, find_job, iso_time
from rlboost.services.rollout_manager.domain.jobs import Audit, Job
from rlboost.services.rollout_manager.domain.money import cost_report, model_cost
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.http.access import SYSTEM, Principal
from rlboost.shared.http.guard import principal_of
from rlboost.shared.http.problem import Problem, problems, success
from rlboost.shared.job.base import served_jobs
from rlboost.shared.messages import Event
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Bus, Entry, position

# --- followers --------------------------------------------------------------------------------------------------------
#
# Clients that follow the events and logs of jobs: one read of Redis at a time waits for all of them.
#
# Consumes: the streams of the followed jobs.
# Produces: for each follower, the entries after its own position.
# Waits for: the next entry of any followed stream, in `Bus.read`, for `BLOCK_S` at a time.
# Ends when: the client disconnects, or the job has ended and all its entries are read.


MAX_FOLLOWERS = 1024
"""Open streams of one manager; beyond it, requests are rejected with 429."""
MAX_FOLLOWERS_OF_TOKEN = 512
"""Open streams of one access token."""
RESERVED_FOLLOWERS = 64
"""Further streams that only the system token may open."""
MAX_READS = 8
"""Concurrent reads of followers; each takes one of the bus's connections."""
BATCH = 512
BLOCK_S = 0.25
"""How long one read waits for all followers; a new follower waits for its end."""
IDLE_S = 1.0
"""How often a follower without an entry for it gets None."""


@dataclass(slots=True, eq=False)
class _Follower:
    """One follower that has read everything up to its cursors."""

    cursors: dict[str, str]
    """Stream that it follows -> id of the last entry read."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EventFollowers:
    """All followers of one manager."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reads = asyncio.Semaphore(MAX_READS)
        self._turn = asyncio.Lock()
        """Held by the follower whose read waits for all."""
        self._waiting: set[_Follower] = set()
        self._of_token: Counter[Principal] = Counter()
        """Principal of a token -> its followers."""

    def check_limit(self, principal: Principal) -> None:
        """Reject one more follower of a token if there are too many.

        Raises:
            Problem: 429.

        """
        n, limit, whose = self._of_token.total(), MAX_FOLLOWERS, ""
        if principal == SYSTEM:
            limit += RESERVED_FOLLOWERS
        elif self._of_token[principal] >= MAX_FOLLOWERS_OF_TOKEN:
            n, limit, whose = self._of_token[principal], MAX_FOLLOWERS_OF_TOKEN, " with this token"
        if n >= limit:
            detail = f"{n} clients{whose} follow events, the most that are possible: close some, or try again later"
            raise Problem(429, "Too many followers", detail, headers={"Retry-After": "5"})

    async def follow(
        self,
        principal: Principal,
        cursors: Mapping[str, str],
        is_over: Callable[[], Awaitable[bool]],
        is_disconnected: Callable[[], Awaitable[bool]],
        is_included: Callable[[Entry], bool] = lambda _: True,
    ) -> AsyncIterator[Entry | None]:
        """Yield the included entries of streams after a cursor in each, and None while there is no new one.

        Older entries come first, by their ids. Ends when the client has disconnected, or once `is_over` is true and all
        entries that were written before are read.
        """
        self._of_token[principal] += 1
        cursors, yielded_at = dict(cursors), time.monotonic()
        try:
            while not await is_disconnected():
                over = await is_over()
                async with self._reads:
                    entries = in_order(await self._bus.read(cursors, count=BATCH))
                for entry in entries:
                    cursors[entry.stream] = entry.id
                    if is_included(entry):
                        yield entry
                        yielded_at = time.monotonic()
                if not entries and over:
                    return
                if not entries:
                    await self._wait_for_entry(_Follower(cursors))
                if time.monotonic() - yielded_at >= IDLE_S:
                    yield None
                    yielded_at = time.monotonic()
        finally:
            self._of_token[principal] -= 1
            if not self._of_token[principal]:
                del self._of_token[principal]

    async def _wait_for_entry(self, follower: _Follower) -> None:
        """Wait up to `IDLE_S` for a new entry in a stream of the follower."""
        limit = time.monotonic() + IDLE_S
        self._waiting.add(follower)
        try:
            while not follower.changed.is_set() and time.monotonic() < limit:
                if self._turn.locked():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(BLOCK_S):
                            await follower.changed.wait()
                else:
                    async with self._turn:
                        await self._read_for_all()
        finally:
            self._waiting.discard(follower)

    async def _read_for_all(self) -> None:
        cursors: dict[str, str] = {}
        for follower in self._waiting:
            for stream, cursor in follower.cursors.items():
                cursors[stream] = min(cursor, cursors.get(stream, cursor), key=position)
        changed = {entry.stream for entry in await self._bus.read(cursors, count=1, block_s=BLOCK_S)}
        for follower in self._waiting:
            if not changed.isdisjoint(follower.cursors):
                follower.changed.set()


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by id, without those that an unread entry of another stream may precede: they are read again."""
    ids: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        ids[entry.stream].append(entry.id)
    # A stream with a whole batch may have more.
    ends = [position(of_stream[-1]) for of_stream in ids.values() if len(of_stream) >= BATCH]
    ordered = sorted(entries, key=lambda entry: position(entry.id))
    return [entry for entry in ordered if position(entry.id) <= min(ends)] if ends else ordered


# --- counters, metrics and samples ------------------------------------------------------------------------------------


_JOB = problems(404, 409)
_CONTINUED = "\n    "
"""Within an entry of a log: no entry can imitate the beginning of another."""
_ENTRY = "[0-9]{1,19}(-[0-9]{1,19})?"
EventId = Annotated[str, Header(pattern=f"^{_ENTRY}(,{_ENTRY})?$")]
"""The last entries that a client has read: of the job's stream, and of the fleet's."""
_CLOCK_SKEW_S = 60.0
"""The most by which the clocks of Redis and of a manager may differ, for a job to show all events of the fleet."""
ROUTES = Routes()


@ROUTES("GET", "/jobs/{job_id}/audit", "read", "history", responses=_JOB)
async def audit(job: OneJob, manager: TheManager, bus: TheBus) -> dict[str, Any]:
    """Account for every sample and token of the job."""
    in_flight = manager.world.queues.in_flight
    live = [(each.is_serving, in_flight.by_requirement[each]) for each in in_flight.of_job(job.id)]
    stored = await bus.hash_get(names.job_audit(job.id), "counters")
    counters = json.loads(stored) if stored else manager.world.jobs[job.id].audit.model_dump()
    counters.pop("cost", None)  # has a route of its own
    counters.setdefault("serving", {})["in_flight"] = sum(n for serves, n in live if serves)
    return {**counters, "in_flight": sum(n for serves, n in live if not serves)}


@ROUTES("GET", "/jobs/{job_id}/cost", "read", "history", responses=_JOB)
async def cost(job: OneJob, bus: TheBus) -> dict[str, Any]:
    """Return what the job's workers and trainer have cost, per step, sample and token, and what migration saved.

    Its other models have costs of their own; `models` has their sums.
    """
    models = [model_cost(served, await _stored_audit(bus, served)) for served in served_jobs(job.id, job.spec)]
    return cost_report(await _stored_audit(bus, job.id), job.step, job.spec.elastic.max_dollars, models)


async def _stored_audit(bus: Bus, job_id: str) -> Audit:
    stored = await bus.hash_get(names.job_audit(job_id), "counters")
    return Audit.model_validate_json(stored) if stored else Audit()


@ROUTES(
    "GET",
    "/jobs/{job_id}/metrics",
    "read",
    "history",
    response_model=None,
    responses=success("application/jsonl") | problems(404),
)
async def metrics(
    job: OneJob,
    bus: TheBus,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002 - fixed by the API
    from_step: Annotated[int, Query(ge=0)] = 0,
) -> list[dict[str, Any]] | PlainTextResponse:
    """Return one row per step, from `from_step` on (the first step is 0)."""
    stored = await bus.hash_all(names.job_metrics(job.id))
    rows = [{"step": int(step), **json.loads(text)} for step, text in stored.items() if int(step) >= from_step]
    rows.sort(key=lambda row: int(row["step"]))
    if format == "jsonl":
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        return PlainTextResponse(lines, media_type="application/jsonl")
    return rows


@ROUTES("GET", "/jobs/{job_id}/samples", "read", "history", responses=problems(404))
async def samples(job: OneJob, bus: TheBus, step: int | None = None) -> list[dict[str, Any]]:
    """Return recent samples with reward and lineage, of one step if `step` is given."""
    entries = await bus.read({names.job_samples(job.id): START}, count=10_000)
    rows = [entry.message.fields for entry in entries if isinstance(entry.message, Event)]
    return [row for row in rows if step is None or row.get("step") == step]


# --- events and logs --------------------------------------------------------------------------------------------------


class _Followed:
    """The entries of a job, for one request."""

    def __init__(self, job: Job, request: Request, manager: Manager) -> None:
        self.job = job
        self._request, self._manager = request, manager
        self._followers: EventFollowers = request.app.state.followers

    def entries(self, cursors: dict[str, str], *, follow: bool) -> AsyncIterator[Entry | None]:
        """Return the entries after the cursors, and those to come until the job ends if `follow`."""
        principal, manager, job_id = principal_of(self._request), self._manager, self.job.id
        self._followers.check_limit(principal)

        async def is_over() -> bool:
            # Look the job up each time: a recovery replaces the world.
            if not follow or not find_job(manager.world.jobs, job_id).ended:
                return not follow
            await manager.turn_end()  # the turn that ended the job may not have written so yet
            return find_job(manager.world.jobs, job_id).ended

        def is_included(entry: Entry) -> bool:
            if entry.stream != names.FLEET_EVENTS:
                return True
            job = find_job(manager.world.jobs, job_id)
            return isinstance(entry.message, Event) and job.is_concerned_by(entry.message)

        return self._followers.follow(principal, cursors, is_over, self._request.is_disconnected, is_included)


async def _followed(job: OneJob, request: Request, manager: TheManager) -> _Followed:
    return _Followed(job, request, manager)


Followed = Annotated[_Followed, Depends(_followed)]


@ROUTES(
    "GET",
    "/jobs/{job_id}/events",
    "read",
    "history",
    response_class=StreamingResponse,
    responses=success("text/event-stream") | problems(404, 429),
)
async def follow_events(followed: Followed, last_event_id: EventId = START, follow: bool = True) -> StreamingResponse:
    """Stream the events of the job and of its fleet until it has ended; with `follow=0` only those that are there.

    Each has an id, with which `Last-Event-ID` resumes after it.
    """
    start = _first_fleet_event(followed.job)
    of_job, _, of_fleet = last_event_id.partition(",")
    of_job_stream = names.job_events(followed.job.id)
    cursors = {of_job_stream: of_job, names.FLEET_EVENTS: max(start, of_fleet or of_job, key=position)}
    events = followed.entries(cursors, follow=follow)
    return StreamingResponse(_server_sent_events(events, cursors), media_type="text/event-stream")


@ROUTES("GET", "/jobs/{job_id}/logs", "read", "history", response_class=PlainTextResponse, responses=problems(404, 429))
async def logs(followed: Followed, follow: bool = False) -> StreamingResponse:
    """Stream the job's events and what all processes log about it as text, by time.

    With `follow`, as they come and until the job ends: log lines of workers come some seconds late.
    """
    job = followed.job
    start = {
        names.job_events(job.id): START,
        names.job_logs(job.id): START,
        names.FLEET_EVENTS: _first_fleet_event(job),
    }
    entries = followed.entries(start, follow=follow)
    if not follow:
        entries = _by_time(entries)
    return StreamingResponse(_log_lines(entries, job.id), media_type="text/plain; charset=utf-8")


def _first_fleet_event(job: Job) -> str:
    """Return the position in the fleet's events from which on they may concern the job."""
    return f"{max(0.0, job.created_at - _CLOCK_SKEW_S) * 1e3:.0f}-0"


async def _server_sent_events(tail: AsyncIterator[Entry | None], cursors: Mapping[str, str]) -> AsyncIterator[str]:
    read = dict(cursors)
    async for entry in tail:
        if entry is None:
            yield ": keep-alive\n\n"
        elif isinstance(entry.message, Event):
            read[entry.stream] = entry.id
            event_id = ",".join(read.values())
            yield f"id: {event_id}\nevent: {entry.message.kind}\ndata: {entry.message.model_dump_json()}\n\n"


async def _by_time(entries: AsyncIterator[Entry | None]) -> AsyncIterator[Entry | None]:
    found = [(event.at, entry) async for entry in entries if entry and isinstance(event := entry.message, Event)]
    for _, entry in sorted(found, key=itemgetter(0)):
        yield entry


async def _log_lines(tail: AsyncIterator[Entry | None], job_id: str) -> AsyncIterator[str]:
    async for entry in tail:
        if entry is not None and isinstance(event := entry.message, Event):
            at = iso_time(event.at, "milliseconds")
            fields = " ".join(f"{name}={value}" for name, value in event.fields.items())
            text = event.fields["text"] if entry.stream == names.job_logs(job_id) else f"{event.kind} {fields}"
            yield f"{at} {event.source} {text}".rstrip().replace("\n", _CONTINUED) + "\n"
