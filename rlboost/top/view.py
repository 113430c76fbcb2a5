"""Draw a snapshot for the terminal: a pure function of the snapshot, the time and the size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from rlboost.client import Json
from rlboost.job_lines import RECENT_STEPS, activity_line, dollars, duration, fitted, remaining, unix_s, wait_line
from rlboost.shared.ids import worker_name
from rlboost.shared.messages import ENDED
from rlboost.terminal import STATE_STYLES, chart
from rlboost.top.fleet_facts import fleet_text, reserved_only_text
from rlboost.top.snapshot import JobSnapshot, Snapshot

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
        reserve = 2 + min(_FEWEST_WORKERS, len(workers) or 1)  # a blank line and the header
        blocks = [_job(job, self.now, width) for job in self.snapshot.jobs]
        n_shown = _fitting([len(block) + 1 for block in blocks], self._left(len(head), reserve + 2))
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
