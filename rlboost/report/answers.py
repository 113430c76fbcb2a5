"""Read what the web page shows of a job, for its report."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx

from rlboost.client import Client, ClientError, Json
from rlboost.report.page import Report, Table, job_answers

SHOWN_PER_ORDER = 8
"""Samples shown per order, as in the page's `samples.js`."""
MAX_SAMPLE_CHARACTERS = 4_000_000
"""Maximum size of the samples in a report, as JSON; those of the newest steps come first."""
_WARNINGS_SHOWN = 50


def read(client: Client, job: Json) -> Report:
    """Return the report of a job, running or ended, from what the API retains of it.

    Raises:
        ClientError: the manager does not answer.

    """
    job_id = job["id"]
    events = [event.data for event in client.jobs.events(job_id, follow=False)]
    answers = job_answers(
        job,
        metrics=client.jobs.metrics(job_id),
        audit=_readable(lambda: client.jobs.audit(job_id)),
        cost=_readable(lambda: client.jobs.cost(job_id)),
        spec=_readable(lambda: client.jobs.spec(job_id)),
    )
    warnings = [str(event["fields"].get("text", "")) for event in events if event["kind"] == "warning"]
    now = time.time()
    return Report(
        at=now,
        job=job_id,
        text=f"Job {job_id}: {job['step']} of {job['steps']} steps, as of {clock(now)}.",
        answers={**answers, "fleet": client.fleet()},
        events=events,
        samples=samples_by_step(client.jobs.samples(job_id)),
        tables=[Table("Warnings", [[text] for text in warnings[-_WARNINGS_SHOWN:]])] if warnings else [],
    )


def samples_by_step(samples: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Return the samples that the page shows, by step from 1, as far as they fit; the newest steps come first."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_step[sample["step"] + 1].append(sample)
    found: dict[int, list[Mapping[str, Any]]] = {}
    room = MAX_SAMPLE_CHARACTERS
    for step in sorted(by_step, reverse=True):
        shown = shown_samples(by_step[step])
        room -= sum(len(json.dumps(sample)) for sample in shown)
        if room < 0:
            break
        if shown:
            found[step] = shown
    return dict(sorted(found.items()))


def shown_samples(samples: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the training samples of one step that the page shows in one of its orders."""
    rows = [sample for sample in samples if not sample.get("is_eval")]
    orders: Sequence[Any] = (
        lambda i: -_or(rows[i]["reward"], float("-inf")),
        lambda i: _or(rows[i]["reward"], float("inf")),
        lambda i: -len(rows[i]["spans"]),
    )
    places = {place for order in orders for place in sorted(range(len(rows)), key=order)[:SHOWN_PER_ORDER]}
    return [rows[place] for place in sorted(places)]


def clock(at: float) -> str:
    """Format Unix seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%d %B %Y, %H:%M UTC")


def _readable(read_part: Any) -> Json | None:
    """Return a part of a job; None of a quarantined one, which has none."""
    try:
        found: Json = read_part()
    except ClientError as error:
        if error.status != httpx.codes.CONFLICT:
            raise
        return None
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
