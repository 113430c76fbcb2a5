"""The live view of a running demo: a redrawn picture fitted to the terminal, or plain lines."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlboost.job_lines import step_line
from rlboost.report import JobEvent, Observation, ProcessEvent, Record, SeenWorker
from rlboost.shared.ids import worker_name
from rlboost.shared.messages import ENDED
from rlboost.terminal import STATE_STYLES, chart

# --- Select the notable events of a run and format them as lines ------------------------------------------------------


Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class EventLine:
    """One line; `at` is Unix seconds."""

    at: float
    tone: Tone
    text: str


class EventLines:
    """Reads a growing record; returns each line once."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._process_events = self._job_events = 0

    def new_lines(self) -> list[EventLine]:
        """Return the new lines since the last call, ordered by time."""
        record = self._record
        lines = list(_of_processes(record.process_events[self._process_events :]))
        lines += _of_job(record.job_events[self._job_events :])
        self._process_events, self._job_events = len(record.process_events), len(record.job_events)
        return sorted(lines, key=lambda line: line.at)


def _of_processes(events: list[ProcessEvent]) -> Iterator[EventLine]:
    for event in events:
        match event.kind:
            case "killed":
                yield EventLine(event.at, "bad", f"✗ {event.name} is gone without notice (SIGKILL)")
            case "noticed":
                yield EventLine(
                    event.at, "warn", f"▼ {event.name} gets notice: its machine will be reclaimed (SIGTERM)"
                )
            case "joined":
                yield EventLine(event.at, "good", f"▶ {event.name} joins: a new machine")
            case "died" | "refused" | "gave_up":
                yield EventLine(event.at, "bad", f"✗ {event.name}: {event.detail}")


def _of_job(events: list[JobEvent]) -> Iterator[EventLine]:
    for event in events:
        fields = event.fields
        match event.kind:
            case "worker_lost":
                yield EventLine(
                    event.at, "bad", f"  {worker_name(fields['worker'])} was declared lost: {fields['reason']}"
                )
            case "samples_unassigned" if fields["cause"] != "suspended":
                whose = f"{fields['samples']} unfinished samples of {worker_name(fields['worker'])}"
                yield EventLine(event.at, "plain", f"  {whose} migrate with their {fields['tokens']:,} tokens")
            case "seeding_reopened":
                yield EventLine(event.at, "warn", "  no spot worker is left: the reserved engine generates again")
            case "checkpoint_saved":
                yield EventLine(event.at, "plain", f"  checkpoint after step {fields['step']}")
            case "job_state_changed":
                because = f": {_first_line(fields['error'])}" if fields["error"] else ""
                yield EventLine(event.at, "plain", f"  the job is {fields['state']}{because}")
            case "group_dropped":
                why = f"{fields['reason']}: {_first_line(fields['detail'])}"
                yield EventLine(event.at, "bad", f"  group {fields['group']} dropped: {why}")
            case "weights_unavailable":
                yield EventLine(event.at, "bad", f"  weights {fields['version']} are unavailable: {fields['reason']}")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


# --- The picture ------------------------------------------------------------------------------------------------------


NEWS_SHOWN = 12
"""Maximum number of events shown, however high the terminal is."""
_FEWEST_NEWS = 6
"""With room for fewer events, the blank lines are left out."""
_FRAME = (4, 2)
"""Columns and lines of the border and its padding."""
_NAME_WIDTH, _VALUE_WIDTH, _GAP = 18, 16, 2
_WIDEST_CHART = 60
_WAIT_LINES = 2
_TONES = {"good": "green", "bad": "red", "warn": "yellow", "plain": "dim"}


@dataclass(frozen=True)
class Picture:
    """The whole screen. It is never higher than the terminal: the oldest events go first, then whole sections.

    Attributes:
        record: what has happened.
        news: notable events, oldest first.
        phase: the demo's own phase.
        now: Unix seconds.

    """

    record: Record
    news: tuple[EventLine, ...]
    phase: str
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Render for the console's size."""
        width, height = options.max_width - _FRAME[0], console.size.height - _FRAME[1] - 1  # a line for the cursor
        sections = self._sections(width)
        used = [len(console.render_lines(Group(*section), options.update(width=width))) for section in sections]
        events = [_event(item, self.record.began_at, width) for item in self.news]
        gaps = len(sections)
        if height - sum(used) - gaps < min(_FEWEST_NEWS, sum(map(len, events))):
            gaps = 0
        while sum(used) + gaps > height and len(sections) > 1:
            sections, used = sections[:-1], used[:-1]
        shown = _newest(events, height - sum(used) - gaps)
        blank = [Text()] if gaps else []
        body = chain.from_iterable([*section, *blank] for section in sections)
        yield Panel(
            Group(*body, *shown), title="RLBoost demo: Countdown on spot workers", title_align="left", padding=(0, 1)
        )

    def _sections(self, width: int) -> list[list[RenderableType]]:
        """Return the parts above the events, most important first."""
        record = self.record
        seen = record.observations[-1] if record.observations else None
        sections: list[list[RenderableType]] = [[_head(record, seen, self.phase, self.now)]]
        if seen is not None:
            sections += [[_learning(record, width)], [_fleet(seen, self.now)], [_waiting(seen, width)]]
        if record.settings.chaos:
            sections[-1].append(_counted(record))
        return sections


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _newest(events: Sequence[Sequence[Text]], lines: int) -> list[Text]:
    """Return the newest whole events that fit into a number of lines, oldest first."""
    shown: list[Text] = []
    for event in reversed(events):
        if len(event) + len(shown) > lines:
            break
        shown[:0] = event
    return shown


def _event(item: EventLine, began_at: float, width: int) -> list[Text]:
    at = f"{clock(item.at - began_at)} "
    indent = " " * (len(at) + 2)
    broken = textwrap.wrap(at + item.text, max(20, width), subsequent_indent=indent, break_on_hyphens=False)
    return [Text(line, style=_TONES[item.tone], no_wrap=True) for line in broken]


def _head(record: Record, seen: Observation | None, phase: str, now: float) -> RenderableType:
    steps, step = record.settings.steps, seen.step if seen else 0
    grid = Table.grid(padding=(0, _GAP))
    grid.add_row(
        Text(f"step {step}/{steps}", style="bold"),
        ProgressBar(total=steps, completed=step, width=30, complete_style="blue"),
        Text(clock(now - record.began_at)),
        Text(phase, style="dim"),
    )
    return grid


def _learning(record: Record, width: int) -> RenderableType:
    accuracy, rows = record.accuracy, record.training_rows
    room = min(_WIDEST_CHART, width - _NAME_WIDTH - _VALUE_WIDTH - 2 * _GAP)
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(width=_NAME_WIDTH)
    grid.add_column(width=_VALUE_WIDTH, no_wrap=True)
    grid.add_column(no_wrap=True)
    shown = " -> ".join(
        f"{value:.0%}" for _, value in (accuracy[:1] + accuracy[-1:] if len(accuracy) > 1 else accuracy)
    )
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    lengths = [row["completions/mean_length"] for row in rows if "completions/mean_length" in row]
    speeds = [observation.tokens_per_s for observation in record.observations]
    percent = Text(shown or "-", style="bold green")
    grid.add_row("held-out accuracy", percent, chart([v for _, v in accuracy], 0, 1, room))
    grid.add_row("reward", f"{rewards[-1]:.2f}" if rewards else "-", chart(rewards, 0, 1, room))
    length = f"{lengths[-1]:.0f} tokens" if lengths else "-"
    grid.add_row("mean length", length, chart(lengths, 0, max(lengths, default=1), room))
    grid.add_row("speed", f"{speeds[-1]:,.0f} tokens/s", chart(speeds, 0, max(speeds), room))
    return grid


def _fleet(seen: Observation, now: float) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("worker", width=12)
    table.add_column("kind", width=9)
    table.add_column("state", width=10)
    for name, width in (("weights", 7), ("samples", 7), ("tokens/s", 8), ("here for", 8)):
        table.add_column(name, width=width, justify="right")
    for worker in sorted(seen.workers, key=lambda worker: (worker.role != "reserved", worker.joined_at)):
        table.add_row(*_worker(worker, now))
    if not seen.workers:
        table.add_row(Text("none", style="dim"))
    return table


def _worker(worker: SeenWorker, now: float) -> Iterator[RenderableType]:
    yield worker_name(worker.id)
    yield "reserved" if worker.role == "reserved" else "spot"
    yield Text(worker.state, style=STATE_STYLES.get(worker.state, ""))
    yield "-" if worker.version is None else str(worker.version)
    yield str(worker.running)
    yield f"{worker.tokens_per_s:,.0f}"
    yield clock(now - worker.joined_at)


def _waiting(seen: Observation, width: int) -> RenderableType:
    if seen.job_state in ENDED:
        return Text(f"the job is {seen.job_state}", style="dim")
    if not seen.waiting_for:
        return Text("waiting for nothing: training", style="dim")
    text = f"waiting for {seen.waiting_for} because {seen.waiting_because}"
    broken = textwrap.wrap(text, max(20, width), max_lines=_WAIT_LINES, placeholder=" ...", break_on_hyphens=False)
    return Text("\n".join(broken))


def _counted(record: Record) -> RenderableType:
    kills, notices, joins = (record.applied(action) for action in ("kill", "notice", "join"))
    scheduled = record.scheduled("kill") + record.scheduled("notice")
    counted = f"{kills + notices} of {scheduled} preemptions ({kills} without notice), {joins} joins"
    return Text(counted, style="bold")


# --- The view: the picture redrawn, or plain lines --------------------------------------------------------------------


class View(Protocol):
    """Shows a record as it grows; a context manager."""

    def __enter__(self) -> Self:
        """Acquire the terminal."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the terminal."""

    def show(self, phase: str, now: float) -> None:
        """Show changes. `phase` is the demo's own phase."""


def view_of(record: Record, console: Console) -> View:
    """Return the view for the console."""
    return Screen(record, console) if console.is_terminal else Lines(record, console)


class Screen:
    """Redraws the whole screen."""

    def __init__(self, record: Record, console: Console) -> None:
        self._record = record
        self._news: deque[EventLine] = deque(maxlen=NEWS_SHOWN)
        self._event_lines = EventLines(record)
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        """Acquire the terminal."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the terminal; the last screen stays."""
        self._live.stop()

    def show(self, phase: str, now: float) -> None:
        """Redraw."""
        self._news.extend(self._event_lines.new_lines())
        self._live.update(Picture(self._record, tuple(self._news), phase, now), refresh=True)


class Lines:
    """Prints a line for each step and each notable event."""

    def __init__(self, record: Record, console: Console) -> None:
        self._record, self._console = record, console
        self._event_lines = EventLines(record)
        self._phase = ""
        self._steps = 0

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do nothing."""

    def show(self, phase: str, now: float) -> None:
        """Print new lines."""
        record = self._record
        if phase != self._phase:
            self._phase = phase
            self._print(now, phase)
        for line in self._event_lines.new_lines():
            self._print(line.at, line.text.strip())
        for row in record.steps[self._steps :]:
            self._print(now, step_line(row, record.settings.steps))
        self._steps = len(record.steps)

    def _print(self, at: float, text: str) -> None:
        self._console.print(
            f"{clock(at - self._record.began_at)}  {text}", markup=False, highlight=False, soft_wrap=True
        )
