"""`rlboost top`: what it reads, what follows from it, and how it is drawn. Pure but for the reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from rlboost.client import Client, Json, Rows
from rlboost.job_lines import (
    GONE,
    RECENT_STEPS,
    activity_line,
    brief_duration,
    dollars,
    duration,
    fitted,
    mix_text,
    remaining,
    unix_s,
    wait_line,
)
from rlboost.shared.ids import worker_name
from rlboost.shared.messages import ENDED
from rlboost.terminal import STATE_STYLES, chart

# --- What more workers would change, and what the job would have cost without spot workers: texts of REST answers -----


def fleet_text(fleet: Json) -> str:
    """Format how many workers are worth having, what one more is worth, the fleet's price, and autoscaling.

    It is empty while none of that is known.
    """
    return "; ".join([*_worth(fleet), *_scaling(fleet["autoscaling"])])


def _worth(fleet: Json) -> Iterator[str]:
    target, worth = fleet["target_workers"], fleet["worth_of_one_more"]
    if target is not None and target > fleet["present"]:
        yield f"up to {target} spot workers would shorten the steps"
    elif target is not None:
        yield (
            f"more than {target} spot worker{'s' if target > 1 else ''} would not shorten the steps"
            if target
            else "spot workers would not shorten the steps"
        )
    if worth is not None and worth["tokens_per_hour"] < 1:
        yield "one more would generate no more tokens per hour"
    elif worth is not None:
        value, price = worth["dollars_per_hour"], worth["price_per_hour"]
        yield (
            f"one more would generate {worth['tokens_per_hour']:,.0f} more tokens per hour"
            + (f", worth {dollars(value)}" if value else "")
            + (f", and costs {dollars(price)}" if price else "")
        )


def _scaling(scaling: Json) -> Iterator[str]:
    price, most = scaling["dollars_per_hour"], scaling["max_dollars_per_hour"]
    if price or most is not None:
        yield f"all workers cost {dollars(price)} per hour" + ("" if most is None else f" of at most {dollars(most)}")
    for pool in scaling["pools"]:
        target = "-" if pool["target"] is None else pool["target"]
        limit = f", limited by {scaling['limited_by']}" if scaling["limited_by"] else ""
        error = f", provider: {pool['error']}" if pool["error"] else ""
        of = f"{target} of at most {pool['max_workers']} {pool['kind']}"
        yield f"autoscaling ({scaling['workers']}): {of}{limit}{error}"
    if reason := mix_text(scaling):
        yield reason


def reserved_only_text(only: Json, spent: float) -> str:
    """Format what the reserved workers alone would have taken and cost so far; `spent` is what the job has cost."""
    saved = 1 - spent / only["dollars"]
    return (
        f"the reserved workers alone would have taken about {duration(only['seconds'])} and cost "
        f"{dollars(only['dollars'])}: with spot workers the job is {100 * abs(saved):.0f} % "
        f"{'cheaper' if saved >= 0 else 'more expensive'}"
    )


# --- Why a job's last step took as long as it did: its parts, and how it differs from the steps before ----------------


PARTS = (
    ("time/seeding_s", "reserved workers generate"),
    ("time/wait_s", "waiting for samples"),
    ("time/train_s", "training"),
    ("time/publish_s", "publishing weights"),
)
"""Metric and name of each part of a step, as the web page has them; the rest of a step is `other`."""
STEPS_BEFORE = 10
"""Steps that the last one is compared with."""
_FEWEST_BEFORE = 3
_DIFFERS = 0.2
"""A smaller relative difference is not mentioned."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a step took than those before it; negative if it took less."""

    steps: int
    """Steps that it is compared with, by their medians."""
    seconds: float
    part: str
    """The part that differs most in the same direction."""
    part_seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step took."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    parts: dict[str, float]
    """Name -> seconds."""
    difference: Difference | None
    """None with few steps before it, or if it took about as long."""
    conversation: tuple[float, float] | None = None
    """Mean seconds of a conversation in the model, and outside it; None without conversations."""

    def text(self) -> str:
        """Format it in the words of the web page."""
        longest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = [f"{name} {100 * s / self.seconds:.0f} %" for name, s in longest_first if s / self.seconds >= 0.01]
        text = f"step {self.step} took {brief_duration(self.seconds)}: {', '.join(shares)}"
        if self.conversation is not None:
            model, outside = map(brief_duration, self.conversation)
            text += f". A conversation spent {model} in the model, {outside} outside it"
        if (than := self.difference) is None:
            return text
        word = "longer" if than.seconds > 0 else "less"
        return (
            f"{text}. That is {brief_duration(abs(than.seconds))} {word} than the median of the {than.steps} steps "
            f"before, mostly {than.part} ({brief_duration(abs(than.part_seconds))} {word})"
        )


def last_step_time(rows: Sequence[Mapping[str, float]], steps: int) -> StepTime | None:
    """Return the time of the last step in rows of metrics, oldest first; None before one has ended.

    Args:
        rows: metrics of the job's last steps.
        steps: number of the job's steps; the row after the last step has only an evaluation.

    """
    timed = [row for row in rows if row.get("time/step_s") and not 0 < steps <= row["step"]]
    if not timed:
        return None
    *before, row = timed
    total, parts = row["time/step_s"], _parts(row)
    conversation = row.get("turns/model_s", 0.0), row.get("turns/outside_s", 0.0)
    difference = _difference(total, parts, before[-STEPS_BEFORE:])
    return StepTime(int(row["step"]) + 1, total, parts, difference, conversation if any(conversation) else None)


def _parts(row: Mapping[str, float]) -> dict[str, float]:
    parts = {name: row.get(metric, 0.0) for metric, name in PARTS}
    return parts | {"other": max(0.0, row["time/step_s"] - sum(parts.values()))}


def _difference(total: float, parts: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> Difference | None:
    if len(before) < _FEWEST_BEFORE:
        return None
    usual = median(row["time/step_s"] for row in before)
    seconds = total - usual
    if abs(seconds) <= _DIFFERS * usual:
        return None
    parts_before = [_parts(row) for row in before]
    changes = {name: s - median(row[name] for row in parts_before) for name, s in parts.items()}
    part = max(changes, key=lambda name: changes[name] if seconds > 0 else -changes[name])
    return Difference(len(before), seconds, part, changes[part])


# --- What `rlboost top` shows at one moment, read from the REST API ---------------------------------------------------


JOBS_SHOWN = 8
"""Maximum number of jobs in a snapshot: active ones first, then the newest."""
_CURVES = ("reward/mean", "perplexity", "rewards/accuracies", "loss")
"""The first of these metrics that a job reports is its curve."""
_EVALUATIONS = ("pass@1", "reward_mean", "perplexity", "rewards/accuracies", "loss")
"""The first of these metrics that a job reports is its evaluation: of `data.eval`, or of the first of `eval.sets`."""
_RECENT_ROWS = STEPS_BEFORE + 2
"""The last step, those before it, and the evaluation after it."""


@dataclass(slots=True)
class JobSnapshot:
    """One job."""

    record: Json
    """The answer of `GET /v1/jobs/{job_id}`."""
    curve_name: str = ""
    curve: list[float] = field(default_factory=list)
    """One value per step, from the first."""
    recent: Rows = field(default_factory=list)
    """Metrics of the last steps."""
    dollars: float = 0.0
    dollars_per_step: float | None = None
    preemptions: int = 0
    """Preemptions of workers that served the job."""
    evaluation_name: str = ""
    evaluation: list[float] = field(default_factory=list)
    """One value per evaluation, from the first."""
    last_step: StepTime | None = None
    reserved_only: Json | None = None
    """What the reserved workers alone would have taken and cost, as `GET /v1/jobs/{job_id}/cost` has it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs, fleet and present workers."""

    at: float
    """Unix seconds."""
    url: str
    fleet: Json
    jobs: list[JobSnapshot]
    hidden_jobs: int
    """Jobs beyond `JOBS_SHOWN`."""
    workers: Rows

    def public(self) -> Json:
        """Return the snapshot for `--json`."""
        return asdict(self)


class SnapshotReader:
    """Reads snapshots; of each job's metrics, only the rows since the last snapshot."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobSnapshot] = {}
        self._next_step: dict[str, int] = {}

    def read(self, client: Client) -> Snapshot:
        """Return a new snapshot; raises `ClientError`."""
        records, workers, fleet = client.jobs.list(), client.workers.list(), client.fleet()
        newest_first = records[::-1]
        records = sorted(newest_first, key=lambda record: record["state"] in ENDED)
        present = [worker for worker in workers if worker["state"] not in GONE]
        shown = [self._read_job(client, record) for record in records[:JOBS_SHOWN]]
        return Snapshot(time.time(), client.url, fleet, shown, len(records) - len(shown), present)

    def _read_job(self, client: Client, record: Json) -> JobSnapshot:
        job_id = record["id"]
        was_ended = job_id in self._jobs and self._jobs[job_id].record["state"] in ENDED
        job = self._jobs.setdefault(job_id, JobSnapshot(record))
        job.record = record
        if was_ended or record["state"] == "pending":
            return job
        for row in client.jobs.metrics(job_id, self._next_step.get(job_id, 0)):
            self._next_step[job_id] = row["step"] + 1
            _add_row(job, row)
        job.last_step = last_step_time(job.recent, record["steps"])
        cost, audit = client.jobs.cost(job_id), client.jobs.audit(job_id)
        job.dollars, job.dollars_per_step = cost["dollars"], cost["dollars_per_step"]
        job.reserved_only = cost["reserved_only"]
        job.preemptions = sum(audit["preemptions"].values())
        return job


def _add_row(job: JobSnapshot, row: Mapping[str, Any]) -> None:
    job.curve_name = job.curve_name or next((name for name in _CURVES if name in row), "")
    if job.curve_name in row:
        job.curve.append(row[job.curve_name])
    job.evaluation_name = job.evaluation_name or _evaluation_of(row)
    if job.evaluation_name in row:
        job.evaluation.append(row[job.evaluation_name])
    job.recent = [*job.recent, dict(row)][-_RECENT_ROWS:]


def _evaluation_of(row: Mapping[str, Any]) -> str:
    names = [name for name in row if name.startswith("eval/")]
    named = ((name, end) for end in _EVALUATIONS for name in (f"eval/{end}", *names))
    return next((name for name, end in named if name in row and name.endswith(f"/{end}")), "")


# --- Drawing a snapshot for the terminal ------------------------------------------------------------------------------


_INDENT = "  "
_WIDEST_CHART = 60
_FEWEST_WORKERS = 3
"""Lines that jobs leave for workers, if there are as many."""
_DETAILS_LEAVE = 1 / 3
"""Fraction of the height that details leave for workers, if there are as many."""
_NARROWEST_CHART = 10
"""With less width, the evaluation is left out."""
_JOB_STYLES = {"running": "green", "paused": "yellow", "failed": "red", "pending": "cyan"}
_LONG_WAIT_S = 30.0
"""A longer wait is highlighted."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    value: Callable[[Json], str | Text]
    justify: Any = "left"
    from_width: int = 0
    """Narrower terminals leave the column out."""


@dataclass(frozen=True)
class View:
    """The screen.

    Attributes:
        snapshot: what to show.
        now: Unix seconds.
        height: most lines; None for no limit. Details are left out first, then the last jobs and workers, which are
            counted.
        problem: why there is no newer snapshot; empty if there is one.

    """

    snapshot: Snapshot
    now: float
    height: int | None = None
    problem: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Render for the console's width."""
        width = options.max_width
        workers = self.snapshot.workers
        head = _head(self.snapshot, self.now, self.problem, width)
        blocks = [_job(job, self.now, width) for job in self.snapshot.jobs]
        n_shown = self._n_jobs([len(block) + 1 for block in blocks], len(head))
        shown = [head, *blocks[:n_shown]]
        if hidden := len(blocks) - n_shown + self.snapshot.hidden_jobs:
            shown.append([Text(f"{hidden} more job{'s' if hidden > 1 else ''}: 'rlboost ps'", style="dim")])
        if not blocks:
            shown.append([Text("no job: 'rlboost run JOB.yaml' starts one", style="dim")])
        self._add_details(shown, n_shown, width)
        lines = [line for block in shown for line in (*block, Text())]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            yield line
        yield from _workers(workers, self.now, self._left(len(lines), 1), width)

    def _n_jobs(self, heights: Sequence[int], n_head: int) -> int:
        """Return how many jobs to show; those that have ended leave room for all workers."""
        n_workers = len(self.snapshot.workers) or 1
        few, all_present = (
            _fitting(heights, self._left(n_head, 4 + n))  # two blank lines, the header, the number of hidden jobs
            for n in (min(_FEWEST_WORKERS, n_workers), n_workers)
        )
        n_active = sum(job.record["state"] not in ENDED for job in self.snapshot.jobs)
        return min(few, max(all_present, n_active, 1))

    def _add_details(self, shown: Sequence[list[Text]], n_jobs: int, width: int) -> None:
        """Add details to the head and the `n_jobs` jobs after it, as far as there is room: the fleet's first."""
        texts = [(shown[0], fleet_text(self.snapshot.fleet))]
        for job, block in zip(self.snapshot.jobs[:n_jobs], shown[1 : n_jobs + 1], strict=True):
            texts += [(block, text) for text in _details(job)]
        details = [(block, _paragraph(text, "", width)) for block, text in texts]
        n_lines = sum(len(block) + 1 for block in shown)
        n_workers = min(int((self.height or 0) * _DETAILS_LEAVE), len(self.snapshot.workers))
        room = self._left(n_lines, 2 + max(1, n_workers))  # the header, and the last line, which stays empty
        for block, added in details[: _fitting([len(added) for _, added in details], room)]:
            block.extend(added)

    def _left(self, n_lines: int, reserve: int) -> int | None:
        return None if self.height is None else max(0, self.height - n_lines - reserve)


def _fitting(heights: Sequence[int], room: int | None) -> int:
    """Return how many blocks from the first fit into a number of lines."""
    used = 0
    for n, height in enumerate(heights):
        used += height
        if room is not None and used > room:
            return n
    return len(heights)


def _head(snapshot: Snapshot, now: float, problem: str, width: int) -> list[Text]:
    fleet = snapshot.fleet
    states = ", ".join(f"{n} {state}" for state, n in fleet["by_state"].items())
    head = Text("rlboost top", style="bold")
    workers = f"{fleet['present']} spot and {fleet['reserved']} reserved workers" + (f" ({states})" if states else "")
    head.append(f"  {fleet['tokens_per_s']:,.0f} tokens/s  {workers}", style="not bold")
    if len(head) + len(snapshot.url) + 2 <= width:
        head.append(f"  {snapshot.url}", style="dim not bold")
    lines = [head]
    if problem:
        age = duration(now - snapshot.at)
        text = f"the manager has not answered for {age}: {problem}"
        lines += [Text(line, style="bold red") for line in fitted(text, width).splitlines()]
    return lines


# --- jobs -------------------------------------------------------------------------------------------------------------


def _job(job: JobSnapshot, now: float, width: int) -> list[Text]:
    record = job.record
    head = Text(record["id"], style="bold")
    head.append(f"  {record['state']}", style=_JOB_STYLES.get(record["state"], "not bold"))
    facts = [f"step {record['step']} of {record['steps']}" if record["steps"] else ""]
    facts.append(remaining(record, job.recent[-RECENT_STEPS:]))
    if job.dollars:
        facts.append(f"{dollars(job.dollars)} ({dollars(job.dollars_per_step)} a step)")
    if job.preemptions:
        facts.append(f"{job.preemptions} preemption{'s' if job.preemptions > 1 else ''}")
    head.append("".join(f"  {fact}" for fact in facts if fact), style="not bold")
    lines = [head]
    if record["error"]:
        lines += _paragraph(f"error: {record['error']}", "red", width)
    if job.curve:
        lines.append(_curve(job, width))
    if record["state"] in ENDED:
        return lines
    if doing := activity_line(record, now):
        wait = record["waiting"]
        is_long = wait is not None and now - unix_s(wait["since"]) > _LONG_WAIT_S
        lines += _paragraph(doing, "yellow" if is_long else "", width)
    for warning in record.get("warnings", ()):
        lines += _paragraph(f"warning: {warning}", "yellow", width)
    return lines


def _details(job: JobSnapshot) -> list[str]:
    """Return why the last step took as long as it did, and what the reserved workers alone would have cost."""
    texts = [job.last_step.text()] if job.last_step and job.record["state"] not in ENDED else []
    return texts + ([reserved_only_text(job.reserved_only, job.dollars)] if job.reserved_only else [])


def _curve(job: JobSnapshot, width: int) -> Text:
    values, name = job.curve, f"{_INDENT}{job.curve_name} "
    number = f" {_change(values)}"
    if job.evaluation:
        evaluation = f"  {job.evaluation_name} {_change(job.evaluation)}"
        number += evaluation if width - len(name + number + evaluation) >= _NARROWEST_CHART else ""
    room = min(_WIDEST_CHART, width - len(name) - len(number))
    values = _averaged(values, max(1, room))
    return Text.assemble(name, chart(values, min(values), max(values), room), number)


def _change(values: Sequence[float]) -> str:
    return f"{values[0]:.4g} -> {values[-1]:.4g}" if len(values) > 1 else f"{values[0]:.4g}"


def _averaged(values: Sequence[float], n: int) -> list[float]:
    """Return at most `n` means of equally long parts, so that the whole run fits."""
    n = min(n, len(values))
    bounds = [len(values) * i // n for i in range(n + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def _paragraph(text: str, style: str, width: int) -> list[Text]:
    broken = fitted(text, width - len(_INDENT)).splitlines()
    return [Text(_INDENT + line, style=style) for line in broken]


# --- workers ----------------------------------------------------------------------------------------------------------


def _workers(workers: Sequence[Json], now: float, room: int | None, width: int) -> Iterator[RenderableType]:
    if not workers:
        yield Text("no worker: 'rlboost worker join' starts one", style="dim")
        return
    columns = [column for column in _COLUMNS if column.from_width <= width]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis")
    ordered = sorted(workers, key=lambda worker: (worker["role"] != "reserved", worker["joined_at"]))
    shown = len(ordered) if room is None or len(ordered) <= room else max(0, room - 1)
    for worker in ordered[:shown]:
        table.add_row(*(column.value(worker) for column in columns))
    yield table
    if hidden := len(ordered) - shown:
        yield Text(f"{hidden} more worker{'s' if hidden > 1 else ''}", style="dim")
    yield from _worker_waits(ordered, now, None if room is None else room - min(room, len(ordered)), width)


def _worker_waits(workers: Sequence[Json], now: float, room: int | None, width: int) -> Iterator[Text]:
    """Yield what workers wait for and how far that is: each one whole, as long as there is room."""
    waiting = [worker for worker in workers if worker.get("waiting")]
    blocks = [_paragraph(f"{worker_name(one['id'])} is {wait_line(one['waiting'], now)}", "", width) for one in waiting]
    for block in blocks[: _fitting([len(block) for block in blocks], room)]:
        yield from block


def _state(worker: Json) -> Text:
    return Text(worker["state"], style=STATE_STYLES.get(worker["state"], ""))


def _number(name: str) -> Callable[[Json], str]:
    return lambda worker: "-" if worker.get(name) is None else f"{worker[name]:,.0f}"


def _joined(worker: Json) -> str:
    return datetime.fromtimestamp(unix_s(worker["joined_at"])).astimezone().strftime("%H:%M:%S")


def _wait(worker: Json) -> str:
    wait = worker.get("waiting")
    return wait["for"] if wait else "-"


_COLUMNS = (
    _Column("worker", lambda worker: worker_name(worker["id"])),
    _Column("role", lambda worker: "reserved" if worker["role"] == "reserved" else "spot"),
    _Column("kind", lambda worker: str(worker["kind"]), from_width=100),
    _Column("state", _state),
    _Column("version", _number("weight_version"), "right"),
    _Column("running", _number("running"), "right", from_width=60),
    _Column("pending", _number("pending"), "right", from_width=70),
    _Column("tokens/s", _number("tokens_per_s"), "right"),
    _Column("$/h", lambda worker: dollars(worker["price_per_hour"] or None), "right", 80),
    _Column("joined", _joined, from_width=110),
    _Column("waiting for", _wait, from_width=120),
    _Column("job", lambda worker: worker["job_id"] or "-", from_width=100),
)
