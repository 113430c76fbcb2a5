"""A report: the record of a run as one JSON file, and the web page with the API's answers about one job in it.

The page is one file that needs no network. Times of a record are Unix seconds of the machine that recorded; durations
are seconds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rlboost.client import Client, ClientError, Json
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import worker_name
from rlboost.shared.page import STATIC
from rlboost.shared.validation import first_error

# --- The record of a run, the input of its report ---------------------------------------------------------------------

Action = Literal["kill", "notice", "join"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Settings(_Part):
    """Options of the run."""

    steps: int
    workers: int
    reserved: int
    chaos: bool
    seed: int
    goal: float | None
    """Target held-out accuracy, None if the run is too short for one."""


class Machine(_Part):
    """The machine it ran on."""

    cores: int
    load: float
    """Load average before the start."""
    platform: str
    python: str


class PlannedChange(_Part):
    """A scheduled change of the fleet."""

    at_step: float
    """Completed steps, with the fraction of the current one."""
    action: Action


class Change(_Part):
    """A change that was applied to the fleet."""

    at: float
    step: int
    action: Action
    worker: str
    """The process's name."""


class ProcessEvent(_Part):
    """An event of a local process."""

    at: float
    kind: str
    name: str
    detail: str


class JobEvent(_Part):
    """An event of the job."""

    at: float
    kind: str
    source: str
    fields: dict[str, Any]


class SeenWorker(_Part):
    """A worker as the manager reported it."""

    id: str
    role: str
    state: str
    joined_at: float
    version: int | None
    running: int
    tokens_per_s: float


class Observation(_Part):
    """A snapshot of the system."""

    at: float
    step: int
    job_state: str
    waiting_for: str
    waiting_because: str
    workers: list[SeenWorker]

    @property
    def tokens_per_s(self) -> float:
        """Return the fleet's throughput."""
        return sum(worker.tokens_per_s for worker in self.workers)


class Record(_Part):
    """The record of a run."""

    format: Literal[2] = 2
    settings: Settings
    machine: Machine
    planned: list[PlannedChange] = []
    began_at: float
    ready_at: float | None = None
    """Time when every process was ready."""
    job_began_at: float | None = None
    """Time when the job was submitted."""
    job_ended_at: float | None = None
    job: dict[str, Any] = {}
    """Last response of `GET /v1/jobs/{id}`."""
    steps: list[dict[str, float]] = []
    """One row of metrics per step."""
    changes: list[Change] = []
    process_events: list[ProcessEvent] = []
    job_events: list[JobEvent] = []
    observations: list[Observation] = []
    samples: dict[int, list[dict[str, Any]]] = {}
    """Samples of some steps, by step from 1: of the last one, and of those with a preemption."""
    audit: dict[str, Any] = {}
    """`GET /v1/jobs/{id}/audit`, like the next two; empty or None if the job did not end."""
    cost: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    cpu_s: dict[str, float] = {}
    """CPU seconds by kind of process, from start to stop."""
    cpu_to_start_s: float = 0.0
    """CPU seconds before the first job: starting processes, importing libraries."""

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Return (training steps, held-out accuracy) of each evaluation."""
        return [(int(row["step"]), row["eval/reward_mean"]) for row in self.steps if "eval/reward_mean" in row]

    @property
    def training_rows(self) -> list[dict[str, float]]:
        """Return the rows of training steps; the final row is an evaluation only."""
        return [row for row in self.steps if row["step"] < self.settings.steps]

    def applied(self, action: Action) -> int:
        """Return the number of applied changes of one kind."""
        return sum(change.action == action for change in self.changes)

    def scheduled(self, action: Action) -> int:
        """Return the number of scheduled changes of one kind."""
        return sum(change.action == action for change in self.planned)


def load(path: Path) -> Record:
    """Read a record from a file.

    Raises:
        ConfigError: it cannot be read, or is not a record.

    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the record.json of a run") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is not the record of a run: {first_error(error)}") from error


# --- Check a run's guarantees from its record -------------------------------------------------------------------------


STEPS_TO_LEARN = 8
"""In fewer steps accuracy rises by less than its noise."""


@dataclass(frozen=True)
class Check:
    """One guarantee; `detail` gives the counts."""

    guarantee: str
    held: bool
    detail: str


def checks(record: Record) -> list[Check]:
    """Return the checks that apply to this run, most important first."""
    found = [_completed(record)]
    if record.settings.steps >= STEPS_TO_LEARN:
        found.append(_learned(record))
    found += [_samples(record), _duplicates(record), _tokens(record)]
    if record.settings.chaos:
        found += [_preemptions(record), _joins(record)]
    return found


def _completed(record: Record) -> Check:
    state = str(record.job.get("state", "never created"))
    error = record.job.get("error")
    return Check("The job completed", state == "completed", f"{state}: {error}" if error else state)


def _learned(record: Record) -> Check:
    goal = record.settings.goal
    promise = "Held-out accuracy rose" + (f" to {goal:.0%} or more" if goal else "")
    accuracy = record.accuracy
    if len(accuracy) < 2:
        return Check(promise, False, f"evaluated {len(accuracy)} times")
    first, last = accuracy[0][1], accuracy[-1][1]
    return Check(promise, last > first and last >= (goal or 0.0), f"from {first:.1%} to {last:.1%}")


def _samples(record: Record) -> Check:
    audit = record.audit
    dropped = sum(audit.get("dropped", {}).values())
    requested, delivered, in_flight = (audit.get(name, 0) for name in ("requested", "delivered", "in_flight"))
    detail = f"{requested:,} requested = {delivered:,} delivered + {dropped:,} dropped"
    if in_flight:
        detail += f" + {in_flight:,} in flight"
    held = requested > 0 and requested == delivered + dropped and in_flight == 0
    return Check("Every sample was delivered, or dropped for a stated reason", held, detail)


def _duplicates(record: Record) -> Check:
    twice = int(sum(row.get("samples/duplicates", 0) for row in record.steps))
    return Check("No sample was delivered twice", twice == 0, f"the trainer saw {twice:,} duplicates")


def _tokens(record: Record) -> Check:
    audit = record.audit
    again = sum(audit.get("tokens_regenerated", {}).values())
    generated = audit.get("tokens_generated", 0)
    delivered = audit.get("tokens_delivered", 0) + audit.get("serving", {}).get("tokens_delivered", 0)
    detail = f"{generated:,} generated = {delivered:,} delivered + {again:,} regenerated"
    return Check("Every token is accounted for", generated == delivered + again and generated > 0, detail)


def _preemptions(record: Record) -> Check:
    counted = record.audit.get("preemptions", {})
    without, given = counted.get("without_notice", 0), counted.get("with_notice", 0)
    kills, notices = record.applied("kill"), record.applied("notice")
    scheduled_kills, scheduled_notices = record.scheduled("kill"), record.scheduled("notice")
    held = kills == scheduled_kills and notices == scheduled_notices and without >= kills and given >= notices
    detail = (
        f"{kills} of {scheduled_kills} by SIGKILL without notice, {notices} of {scheduled_notices} with notice; "
        f"the manager counted {without} and {given}"
    )
    return Check("Every scheduled preemption took place, and was noticed", held, detail)


def _joins(record: Record) -> Check:
    applied, scheduled = record.applied("join"), record.scheduled("join")
    return Check("Every scheduled join took place", applied == scheduled, f"{applied} of {scheduled}")


# --- The page ---------------------------------------------------------------------------------------------------------

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """A table that only a report has."""

    title: str
    rows: Sequence[Sequence[str]]
    place: Literal["checks", "appendix"] = "checks"
    """The element that it is in: above the charts, or at the end."""


@dataclass(frozen=True)
class Report:
    """What the page shows instead of asking the API. Times are Unix seconds; steps count from 1."""

    at: float
    """When the answers were given."""
    job: str
    """The job's id."""
    text: str
    """Stands above everything else."""
    answers: Mapping[str, Any]
    """JSON answers by path below `/v1`, without the query."""
    events: Sequence[Mapping[str, Any]] = ()
    """The job's events, oldest first."""
    samples: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Samples by step: see `shown_samples`."""
    tables: Sequence[Table] = ()


def job_answers(job: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the answers that the page needs of one job; parts are named as in `GET /v1/jobs/{job_id}/PART`."""
    base = f"jobs/{job['id']}"
    return {"jobs": [job], base: job, **{f"{base}/{name}": answer for name, answer in parts.items()}}


def write(report: Report, out: Path) -> Path:
    """Write `index.html` into a folder, which is created; return its path.

    Raises:
        ConfigError: it cannot be written.

    """
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        page.write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: name a folder that can be written") from error
    return page


def render(report: Report) -> str:
    """Return the page as HTML. Its content security policy lets only the page's own script run."""
    script = "\n" + "\n".join(_modules("main.js", set()))
    style = "\n" + (STATIC / "style.css").read_text(encoding="utf-8")
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    data = json.dumps(asdict(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    for tag, inlined in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ('<link rel="stylesheet" href="page/style.css">', f"<style>{style}</style>"),
        ('<link rel="icon" href="page/icon.svg">', f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">'),
        (
            '<script type="module" src="page/main.js"></script>',
            f'<script type="application/json" id="report">{data}</script>\n<script type="module">{script}</script>',
        ),
    ):
        before, found, after = text.partition(tag)
        if not found:
            raise ValueError(f"{STATIC / 'index.html'} has no {tag}")
        text = before + inlined + after
    return text


def _modules(name: str, seen: set[str]) -> list[str]:
    """Return a module and those that it imports, each once and after its imports, as parts of one module."""
    seen.add(name)
    text = (STATIC / name).read_text(encoding="utf-8")
    parts: list[str] = []
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            parts += _modules(imported, seen)
    return [*parts, _EXPORT.sub("", _IMPORT.sub("", text))]


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- Read what the web page shows of a job, for its report ------------------------------------------------------------


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
        audit=client.jobs.audit(job_id),
        cost=client.jobs.cost(job_id),
        spec=_readable_spec(client, job_id),
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


def _readable_spec(client: Client, job_id: str) -> Json | None:
    try:
        return client.jobs.spec(job_id)
    except ClientError as error:
        if error.status == HTTPStatus.CONFLICT:  # the manager could not read it either
            return None
        raise


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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


# --- The report of a recorded demo: its job's page, and above it what the demo checked and used -----------------------


_NO_JOB = {"id": "none", "name": "no job", "state": "pending", "step": 0, "waiting": None, "warnings": [], "latest": {}}
_APPLIED = {"kill": "worker_killed", "join": "worker_started"}


def report_of(record: Record) -> Report:
    """Return the report; a run that ended early has one too."""
    times = {"started_at": None, "finished_at": None, "error": None, "steps": record.settings.steps}
    job = {**_NO_JOB, **times, **record.job}
    parts: dict[str, Any] = {"metrics": record.steps, "audit": record.audit or None}
    seen = [event.at for event in record.job_events] + [look.at for look in record.observations]
    return Report(
        at=record.job_ended_at or max(seen, default=record.began_at),
        job=job["id"],
        text=_text(record),
        answers=job_answers(job, cost=record.cost, spec=record.spec, **parts),
        events=[event.model_dump() for event in _events(record)],
        samples=record.samples,
        tables=[table for table in _tables(record) if table.rows],
    )


def _text(record: Record) -> str:
    settings = record.settings
    held = all(check.held for check in checks(record))
    preempted = record.applied("kill") + record.applied("notice")
    return (
        f"{'Every guarantee held' if held else 'Some guarantees were violated'}. "
        f"{settings.steps} steps of GRPO on {settings.reserved} reserved and {settings.workers} preemptible workers, "
        f"with {preempted} preemptions ({record.applied('kill')} by SIGKILL without notice) and "
        f"{record.applied('join')} joins. {clock(record.began_at)}, {record.machine.cores} cores."
    )


def _events(record: Record) -> list[JobEvent]:
    """Return the job's events and, as further ones, when workers were started and killed."""
    ids = {
        worker_name(event.fields["worker"]): event.fields["worker"]
        for event in record.job_events
        if "worker" in event.fields
    }
    ids |= {worker_name(one.id): one.id for look in record.observations for one in look.workers}
    applied = [_applied(change, ids) for change in record.changes if change.action in _APPLIED]
    return sorted(chain(record.job_events, applied), key=lambda event: event.at)


def _applied(change: Change, ids: Mapping[str, str]) -> JobEvent:
    worker = ids.get(change.worker, f"{change.worker}-")
    return JobEvent(at=change.at, kind=_APPLIED[change.action], source="demo", fields={"worker": worker})


def _tables(record: Record) -> Iterator[Table]:
    marks = {True: "✓ held", False: "✗ violated"}
    yield Table("Guarantees", [[marks[check.held], check.guarantee, check.detail] for check in checks(record)])
    total = sum(record.cpu_s.values())
    rows = [[kind, f"{seconds:.1f} s", f"{seconds / total:.0%}"] for kind, seconds in record.cpu_s.items()]
    if rows:
        rows += [["all", f"{total:.1f} s", ""], ["of it, before the job", f"{record.cpu_to_start_s:.1f} s", ""]]
    yield Table("Processor time", rows, "appendix")
    settings, machine = record.settings, record.machine
    rows = [
        ["workers at the start", f"{settings.reserved} reserved, {settings.workers} preemptible"],
        ["seed", str(settings.seed)],
        ["cores", str(machine.cores)],
        ["load before the start", f"{machine.load:.1f}"],
        ["system", f"{machine.platform}, Python {machine.python}"],
    ]
    yield Table("This run", rows, "appendix")
