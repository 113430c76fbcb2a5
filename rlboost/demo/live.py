"""The live view of a run: a redrawn screen, or plain lines if the output is not a terminal."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from rlboost.demo.picture import NEWS_SHOWN, EventLine, EventLines, Picture, clock
from rlboost.job_lines import step_line
from rlboost.report import Record


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
