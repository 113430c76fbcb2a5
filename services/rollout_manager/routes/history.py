"""Routes of a job's history: audit, metrics, samples, events, logs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from operator import itemgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.cost_report import cost_report
from rlboost.services.rollout_manager.domain.jobs.record import Job, QuarantinedJob
from rlboost.services.rollout_manager.routes.event_followers import EventFollowers
from rlboost.services.rollout_manager.routes.timestamps import iso_time
from rlboost.shared.http.authentication import needs
from rlboost.shared.http.documented import problems, success
from rlboost.shared.http.problem import Problem
from rlboost.shared.messages import Event
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.entries import START, Entry

_JOB = problems(404, 409)
_CONTINUED = "\n    "
"""Within an entry of a log: no entry can imitate the beginning of another."""
EventId = Annotated[str, Header(pattern=r"^[0-9]{1,19}(-[0-9]{1,19})?$")]


def readable_job(manager: Manager, job_id: str) -> Job:
    """Return a job; raises `Problem` if there is none, or if it is quarantined."""
    job = find_job(manager, job_id)
    if isinstance(job, QuarantinedJob):
        raise Problem(409, "Job quarantined", f"job {job_id} is {job.reason}")
    return job


def find_job(manager: Manager, job_id: str) -> Job | QuarantinedJob:
    """Return a job, or what is known of a quarantined one; raises `Problem` if there is none."""
    job = manager.world.jobs.get(job_id) or manager.world.quarantined.get(job_id)
    if job is None:
        raise Problem(404, "No such job", f"there is no job {job_id!r}: list them with 'rlboost ps' or GET /v1/jobs")
    return job


def add_history(router: APIRouter, manager: Manager, bus: Bus) -> None:
    """Add the routes of what is stored of a job."""

    @router.get("/jobs/{job_id}/audit", tags=["history"], responses=_JOB)
    @needs("read")
    async def audit(job_id: str) -> dict[str, Any]:
        """Account for every sample and token of the job."""
        job = readable_job(manager, job_id)
        in_flight = manager.world.in_flight
        live = [(each.is_serving, in_flight.by_requirement[each]) for each in in_flight.of_job(job.id)]
        stored = await bus.hash_get(names.job_audit(job.id), "counters")
        counters = json.loads(stored) if stored else manager.world.audits.get(job.id, Audit()).model_dump()
        counters.pop("cost", None)  # has a route of its own
        counters.setdefault("serving", {})["in_flight"] = sum(n for serves, n in live if serves)
        return {**counters, "in_flight": sum(n for serves, n in live if not serves)}

    @router.get("/jobs/{job_id}/cost", tags=["history"], responses=_JOB)
    @needs("read")
    async def cost(job_id: str) -> dict[str, Any]:
        """Return what the job's workers and trainer have cost, per step, sample and token, and what migration saved."""
        job = readable_job(manager, job_id)
        stored = await bus.hash_get(names.job_audit(job.id), "counters")
        audit = Audit.model_validate_json(stored) if stored else Audit()
        return cost_report(audit, job.step, job.spec.elastic.max_dollars)

    @router.get(
        "/jobs/{job_id}/metrics",
        tags=["history"],
        response_model=None,
        responses=success("application/jsonl") | problems(404),
    )
    @needs("read")
    async def metrics(
        job_id: str,
        format: Literal["json", "jsonl"] = "json",  # noqa: A002 - fixed by the API
        from_step: Annotated[int, Query(ge=0)] = 0,
    ) -> list[dict[str, Any]] | PlainTextResponse:
        """Return one row per step, from `from_step` on (the first step is 0)."""
        job = find_job(manager, job_id)
        stored = await bus.hash_all(names.job_metrics(job.id))
        rows = [{"step": int(step), **json.loads(text)} for step, text in stored.items() if int(step) >= from_step]
        rows.sort(key=lambda row: int(row["step"]))
        if format == "jsonl":
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            return PlainTextResponse(lines, media_type="application/jsonl")
        return rows

    @router.get("/jobs/{job_id}/samples", tags=["history"], responses=problems(404))
    @needs("read")
    async def samples(job_id: str, step: int | None = None) -> list[dict[str, Any]]:
        """Return recent samples with reward and lineage, of one step if `step` is given."""
        job = find_job(manager, job_id)
        entries = await bus.read({names.job_samples(job.id): START}, count=10_000)
        rows = [entry.message.fields for entry in entries if isinstance(entry.message, Event)]
        return [row for row in rows if step is None or row.get("step") == step]


def add_events(router: APIRouter, manager: Manager, bus: Bus) -> None:
    """Add the routes of a job's events."""
    followers = EventFollowers(bus)

    def followed(
        job_id: str, cursors: dict[str, str], request: Request, *, follow: bool
    ) -> AsyncIterator[Entry | None]:
        find_job(manager, job_id)
        followers.check_limit()
        # Look the job up each time: a recovery replaces the world.
        return followers.follow(cursors, lambda: not follow or find_job(manager, job_id).ended, request.is_disconnected)

    @router.get(
        "/jobs/{job_id}/events",
        tags=["history"],
        response_class=StreamingResponse,
        responses=success("text/event-stream") | problems(404, 429),
    )
    @needs("read")
    async def follow_events(
        job_id: str, request: Request, last_event_id: EventId = START, follow: bool = True
    ) -> StreamingResponse:
        """Stream the job's events until it has ended; with `follow=0` only those that are there."""
        events = followed(job_id, {names.job_events(job_id): last_event_id}, request, follow=follow)
        return StreamingResponse(_server_sent_events(events), media_type="text/event-stream")

    @router.get(
        "/jobs/{job_id}/logs",
        tags=["history"],
        response_class=PlainTextResponse,
        responses=problems(404, 429),
    )
    @needs("read")
    async def logs(job_id: str, request: Request, follow: bool = False) -> StreamingResponse:
        """Stream the job's events and what all processes log about it as text, by time.

        With `follow`, as they come and until the job ends: log lines of workers come some seconds late.
        """
        cursors = {names.job_events(job_id): START, names.job_logs(job_id): START}
        entries = followed(job_id, cursors, request, follow=follow)
        if not follow:
            entries = _by_time(entries)
        return StreamingResponse(_log_lines(entries, job_id), media_type="text/plain; charset=utf-8")


async def _server_sent_events(tail: AsyncIterator[Entry | None]) -> AsyncIterator[str]:
    async for entry in tail:
        if entry is None:
            yield ": keep-alive\n\n"
        elif isinstance(entry.message, Event):
            yield f"id: {entry.id}\nevent: {entry.message.kind}\ndata: {entry.message.model_dump_json()}\n\n"


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
