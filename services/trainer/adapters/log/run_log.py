"""Passes metrics to third-party loggers, which may be slow, fail or hang without blocking or ending the job.

Each logger has a thread and a bounded queue. The first problem of each logger is reported, once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import structlog

log = structlog.get_logger(__name__)

_QUEUED_ROWS = 1024
PATIENCE_S = 60.0
"""A logger that takes longer than this for one row is reported as hanging."""


class Logger(Protocol):
    """Destination of rows. Created, used and closed in one thread; may raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row; steps increase."""

    def close(self) -> None:
        """Send buffered rows."""


class LoggerFailed(Exception):
    """A logger's failure, with a text for users. Any other exception is reported with its type."""


Opener = Callable[[int], Logger]
"""Creates a logger for rows from this step on, which replace those that an earlier process has logged."""


class _Row(NamedTuple):
    step: int
    metrics: Mapping[str, float]


class RunLog:
    """The third-party loggers of one job."""

    def __init__(self, openers: Mapping[str, Opener], patience_s: float = PATIENCE_S) -> None:
        """Open no logger yet; `openers` are by the loggers' names, `patience_s` is the limit for one row."""
        self._openers = openers
        self._patience_s = patience_s
        self._threads: list[_LoggerThread] = []

    def begin(self, step: int) -> None:
        """Open the loggers, for rows from `step` on."""
        self._threads = [_LoggerThread(name, opener, step, self._patience_s) for name, opener in self._openers.items()]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a row for every logger, without blocking."""
        for thread in self._threads:
            thread.put(_Row(step, metrics))

    def new_problems(self) -> list[str]:
        """Return the problems that were not returned before."""
        return [problem for thread in self._threads if (problem := thread.new_problem())]

    def close(self, limit_s: float) -> None:
        """Let the loggers finish, for up to `limit_s`; slower ones continue for as long as the process lives."""
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(until)


class _LoggerThread:
    """One logger's thread and queue."""

    def __init__(self, name: str, opener: Opener, step: int, patience_s: float) -> None:
        self._name = name
        self._opener = opener
        self._patience_s = patience_s
        self._rows: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        """None after the last row. At most `_QUEUED_ROWS` rows."""
        self._busy_since: float | None = time.monotonic()
        self._problem = ""
        self._reported = False
        self._closed = False
        # A daemon: a logger that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(step,), name=f"log-{name}", daemon=True)
        self._thread.start()

    def put(self, row: _Row) -> None:
        if not self._thread.is_alive():
            return
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._patience_s:
            self._note(f"it has not answered for {self._patience_s:.0f} s")
        if self._rows.qsize() < _QUEUED_ROWS:
            self._rows.put(row)
        else:
            self._note(f"its queue of {_QUEUED_ROWS} rows is full, so later rows are dropped")

    def end(self) -> None:
        if not self._closed:
            self._closed = True
            self._rows.put(None)

    def join(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._note("it has not sent all rows at the end of the job; it continues while the trainer runs")

    def new_problem(self) -> str:
        if self._reported or not self._problem:
            return ""
        self._reported = True
        return f"log.{self._name}: {self._problem}; the job continues, and metrics.jsonl has every row"

    def _note(self, problem: str) -> None:
        if not self._problem:
            self._problem = problem
            log.warning("logger_failed", to=self._name, reason=problem)

    def _run(self, step: int) -> None:
        try:
            logger = self._opener(step)
            self._busy_since = None
            while (row := self._rows.get()) is not None:
                self._busy_since = time.monotonic()
                logger.log(row.step, row.metrics)
                self._busy_since = None
            self._busy_since = time.monotonic()
            logger.close()
        except Exception as error:  # noqa: BLE001 - a third-party library, and the network
            kind = "" if isinstance(error, LoggerFailed) else f"{type(error).__name__}: "
            self._note(kind + str(error).partition("\n")[0].rstrip("."))
