"""The live view of a run: a redrawn screen, or plain lines if the output is not a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlboost.demo.news import News, Newsroom
from rlboost.follow import ENDED
from rlboost.job_lines import step_line
from rlboost.report.record import Observation, Record, SeenWorker

NEWS_SHOWN = 9
_BARS = "▁▂▃▄▅▆▇█"
_CHART_WIDTH = 44
_STATE_STYLES = {
    "joining": "dim",
    "pulling": "cyan",
    "ready": "green",
    "suspended": "magenta",
    "draining": "yellow",
}
_TONES = {"good": "green", "bad": "red", "warn": "yellow", "plain": "dim"}


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
        """Draw on the console."""
        self._record = record
        self._news: deque[News] = deque(maxlen=NEWS_SHOWN)
        self._room = Newsroom(record)
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
        self._news.extend(self._room.fresh())
        self._live.update(draw(self._record, list(self._news), phase, now), refresh=True)


class Lines:
    """Prints a line for each step and each notable event."""

    def __init__(self, record: Record, console: Console) -> None:
        """Print on the console."""
        self._record, self._console = record, console
        self._room = Newsroom(record)
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
        for news in self._room.fresh():
            self._print(news.at, news.text.strip())
        for row in record.steps[self._steps :]:
            self._print(now, step_line(row, record.settings.steps))
        self._steps = len(record.steps)

    def _print(self, at: float, text: str) -> None:
        self._console.print(
            f"{clock(at - self._record.began_at)}  {text}", markup=False, highlight=False, soft_wrap=True
        )


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(record: Record, news: Sequence[News], phase: str, now: float) -> RenderableType:
    """Render the whole screen."""
    seen = record.observations[-1] if record.observations else None
    parts: list[RenderableType] = [_head(record, seen, phase, now)]
    if seen is not None:
        parts += [Text(), _learning(record), Text(), _fleet(seen, now), Text(), _waiting(seen)]
    parts += [Text(), *_news(record, news)]
    return Panel(Group(*parts), title="RLBoost demo: Countdown on spot workers", title_align="left", padding=(0, 1))


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _head(record: Record, seen: Observation | None, phase: str, now: float) -> RenderableType:
    steps, step = record.settings.steps, seen.step if seen else 0
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(f"step {step}/{steps}", style="bold"),
        ProgressBar(total=steps, completed=step, width=30, complete_style="blue"),
        Text(clock(now - record.began_at)),
        Text(phase, style="dim"),
    )
    return grid


def _learning(record: Record) -> RenderableType:
    accuracy, rows = record.accuracy, record.training_rows
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=18)
    grid.add_column(width=16, no_wrap=True)
    grid.add_column(no_wrap=True)
    shown = " -> ".join(
        f"{value:.0%}" for _, value in (accuracy[:1] + accuracy[-1:] if len(accuracy) > 1 else accuracy)
    )
    grid.add_row("held-out accuracy", Text(shown or "-", style="bold green"), _chart([v for _, v in accuracy], 0, 1))
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    lengths = [row["completions/mean_length"] for row in rows if "completions/mean_length" in row]
    speeds = [observation.tokens_per_s for observation in record.observations]
    grid.add_row("reward", f"{rewards[-1]:.2f}" if rewards else "-", _chart(rewards, 0, 1))
    grid.add_row(
        "mean length", f"{lengths[-1]:.0f} tokens" if lengths else "-", _chart(lengths, 0, max(lengths, default=1))
    )
    grid.add_row("speed", f"{speeds[-1]:,.0f} tokens/s", _chart(speeds, 0, max(speeds)))
    return grid


def _chart(values: Sequence[float], low: float, high: float) -> Text:
    """Render the last values as bars."""
    scale = (len(_BARS) - 1) / ((high - low) or 1)
    bars = (_BARS[min(len(_BARS) - 1, max(0, round((value - low) * scale)))] for value in values[-_CHART_WIDTH:])
    return Text("".join(bars), style="blue")


def _fleet(seen: Observation, now: float) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
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
    yield worker.id.rpartition("-")[0]
    yield "reserved" if worker.role == "reserved" else "spot"
    yield Text(worker.state, style=_STATE_STYLES.get(worker.state, ""))
    yield "-" if worker.version is None else str(worker.version)
    yield str(worker.running)
    yield f"{worker.tokens_per_s:,.0f}"
    yield clock(now - worker.joined_at)


def _waiting(seen: Observation) -> RenderableType:
    if seen.job_state in ENDED:
        return Text(f"the job is {seen.job_state}", style="dim")
    if not seen.waiting_for:
        return Text("waiting for nothing: training", style="dim", no_wrap=True)
    return Text(f"waiting for {seen.waiting_for} because {seen.waiting_because}", no_wrap=True, overflow="ellipsis")


def _news(record: Record, news: Sequence[News]) -> Iterator[RenderableType]:
    settings = record.settings
    if settings.chaos:
        kills, notices, joins = (record.applied(action) for action in ("kill", "notice", "join"))
        scheduled = record.scheduled("kill") + record.scheduled("notice")
        counted = f"{kills + notices} of {scheduled} preemptions ({kills} without notice), {joins} joins"
        yield Text(counted, style="bold")
    for item in news:
        yield Text(f"{clock(item.at - record.began_at)} {item.text}", style=_TONES[item.tone], no_wrap=True)
