"""Metrics on their way to loggers of others, which may be slow, fail or hang: the job neither waits nor ends for it.

Each logger has a thread of its own and a bounded queue in front of it. What goes wrong is told once a logger.
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
"""A logger that takes longer than this for one row hangs, as far as people are told."""


class Logger(Protocol):
    """Where rows are shown. Made, used and closed in one thread; may raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a row; its step is higher than those before."""

    def close(self) -> None:
        """Send what was not sent yet."""


class LoggerFailed(Exception):
    """Why a logger gives up, in words for people. Any other error does, too, and is told with its kind."""


Opener = Callable[[int], Logger]
"""Makes a logger for the rows from this step on; what an earlier process gave it of these is to be forgotten."""


class _Row(NamedTuple):
    step: int
    metrics: Mapping[str, float]


class RunLog:
    """All loggers of one job."""

    def __init__(self, openers: Mapping[str, Opener], patience_s: float = PATIENCE_S) -> None:
        """Open nothing yet; `openers` by the name that people know a logger by."""
        self._openers = openers
        self._patience_s = patience_s
        self._feeds: list[_Feed] = []

    def begin(self, step: int) -> None:
        """Open the loggers, for rows from `step` on."""
        self._feeds = [_Feed(name, opener, step, self._patience_s) for name, opener in self._openers.items()]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a row to every logger, at once."""
        for feed in self._feeds:
            feed.put(_Row(step, metrics))

    def troubles(self) -> list[str]:
        """Return what went wrong and was not told yet."""
        return [trouble for feed in self._feeds if (trouble := feed.new_trouble())]

    def close(self, limit_s: float) -> None:
        """Let the loggers finish, and wait for `limit_s` at most; who needs longer goes on while the process lives."""
        until = time.monotonic() + limit_s
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(until)


class _Feed:
    """One logger's thread and queue."""

    def __init__(self, name: str, opener: Opener, step: int, patience_s: float) -> None:
        self._name = name
        self._opener = opener
        self._patience_s = patience_s
        self._rows: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        """None behind the last row; never longer than `_QUEUED_ROWS` and that."""
        self._busy_since: float | None = time.monotonic()
        self._trouble = ""
        self._told = False
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
            self._note(f"{_QUEUED_ROWS} rows wait for it, so later ones are left out")

    def end(self) -> None:
        if not self._closed:
            self._closed = True
            self._rows.put(None)

    def join(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._note("it has not sent everything when the job ended; it goes on as long as the trainer runs")

    def new_trouble(self) -> str:
        if self._told or not self._trouble:
            return ""
        self._told = True
        return f"log.{self._name}: {self._trouble}; the job goes on, and metrics.jsonl has every row"

    def _note(self, trouble: str) -> None:
        if not self._trouble:
            self._trouble = trouble
            log.warning("logger_failed", to=self._name, reason=trouble)

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
        except Exception as error:  # noqa: BLE001 - a library of others, and the network
            kind = "" if isinstance(error, LoggerFailed) else f"{type(error).__name__}: "
            self._note(kind + str(error).partition("\n")[0].rstrip("."))
