"""Passes metrics to third-party loggers, which may be slow, fail or hang without blocking or ending the job.

Each logger has a thread and a bounded queue. The first problem of each logger is reported, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, Protocol

import structlog

from rlboost.services.trainer.adapters.tracker_child import STARTED
from rlboost.services.trainer.ports.storage import LoggedSample, RunEnd
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.base import TRACKERS, ServiceJob, missing_log_libraries
from rlboost.shared.settings import environment_without_settings

log = structlog.get_logger(__name__)

_QUEUED_ROWS = 1024
PATIENCE_S = 60.0
"""A logger that takes longer than this for one row is reported as hanging."""


class Row(NamedTuple):
    """What is logged of a step."""

    step: int
    metrics: dict[str, float]
    samples: Sequence[LoggedSample] = ()


class Logger(Protocol):
    """Destination of rows. Created, used and closed in one thread; may raise anything."""

    def log(self, row: Row) -> None:
        """Log a row; steps increase."""

    def close(self, end: RunEnd) -> None:
        """Send buffered rows, and how the run ends."""


class LoggerFailed(Exception):
    """A logger's failure, with a text for users. Any other exception is reported with its type."""


Opener = Callable[[int], Logger]
"""Creates a logger for rows from this step on, which replace those that an earlier process has logged."""


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

    def log(self, row: Row) -> None:
        """Queue a row for every logger, without blocking."""
        for thread in self._threads:
            thread.put(row)

    def new_problems(self) -> list[str]:
        """Return the problems that were not returned before."""
        return [problem for thread in self._threads if (problem := thread.new_problem())]

    def close(self, limit_s: float, end: RunEnd) -> None:
        """Let the loggers finish, for up to `limit_s`; slower ones continue for as long as the process lives."""
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.end(end)
        for thread in self._threads:
            thread.join(until)


class _LoggerThread:
    """One logger's thread and queue."""

    def __init__(self, name: str, opener: Opener, step: int, patience_s: float) -> None:
        self._name = name
        self._opener = opener
        self._patience_s = patience_s
        self._rows: queue.SimpleQueue[Row | RunEnd] = queue.SimpleQueue()
        """How the run ends follows the last row. At most `_QUEUED_ROWS` rows."""
        self._busy_since: float | None = time.monotonic()
        self._problem = ""
        self._reported = False
        self._closed = False
        # A daemon: a logger that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(step,), name=f"log-{name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        if not self._thread.is_alive():
            return
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._patience_s:
            self._note(f"it has not answered for {self._patience_s:.0f} s")
        if self._rows.qsize() < _QUEUED_ROWS:
            self._rows.put(row)
        else:
            self._note(f"its queue of {_QUEUED_ROWS} rows is full, so later rows are dropped")

    def end(self, end: RunEnd) -> None:
        if not self._closed:
            self._closed = True
            self._rows.put(end)

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
            while isinstance(row := self._rows.get(), Row):
                self._busy_since = time.monotonic()
                logger.log(row)
                self._busy_since = None
            self._busy_since = time.monotonic()
            logger.close(row)
        except Exception as error:  # noqa: BLE001 - a third-party library, and the network
            kind = "" if isinstance(error, LoggerFailed) else f"{type(error).__name__}: "
            self._note(kind + str(error).partition("\n")[0].rstrip("."))


# --- Trackers as loggers: Weights & Biases, MLflow and SwanLab --------------------------------------------------------
# Their libraries run in a child process, because they wait for the network for minutes at exit, and a stopping trainer
# has only seconds.


class TrackerProcess:
    """`Logger` that creates the job's run of a tracker, or continues it."""

    def __init__(self, name: str, spec: ServiceJob, job_id: str, folder: Path) -> None:
        """Start or continue the run; its files are in `folder`.

        Raises:
            LoggerFailed: the run cannot be started; with the library's own message.

        """
        folder.mkdir(parents=True, exist_ok=True)
        secret = (one for one in TRACKERS[name].environment if one.endswith(("_KEY", "_PASSWORD", "_TOKEN")))
        self._secrets = [value for one in secret if (value := os.environ.get(one))]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = Popen(
            [sys.executable, "-m", "rlboost.services.trainer.adapters.tracker_child"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._stderr,
            env=environment_without_settings(),
            text=True,
            start_new_session=True,  # signals to the trainer must not stop it before it has sent its rows
        )
        section = spec.log.trackers[name].model_dump(mode="json")
        job = {"name": spec.name, "id": job_id, "dir": str(folder), "config": spec.model_dump(mode="json")}
        self._send({"tracker": name, "section": section, **job})
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != STARTED:
            raise self._failure()

    def log(self, row: Row) -> None:
        self._send({"step": row.step, "metrics": row.metrics, "samples": row.samples})

    def close(self, end: RunEnd) -> None:
        self._send(end)
        if self._process.wait():
            raise self._failure()
        self._release()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _failure(self) -> LoggerFailed:
        self._process.kill()
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._release()
        return LoggerFailed(self._without_secrets(lines[-1]) if lines else "its process ended without an error message")

    def _without_secrets(self, text: str) -> str:
        """Return a library's message without passwords in URLs, and without those in the environment."""
        text = re.sub(r"//[^/@\s]+@", "//***@", text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._stderr.close()


# --- The loggers of a job file's `log` section: TensorBoard and the trackers ------------------------------------------


def openers(spec: ServiceJob, job_id: str, folder: Path) -> dict[str, Opener]:
    """Return the functions that create a job's loggers, by name; `folder` is the run's folder.

    Raises:
        ConfigError: a library is not installed.

    """
    if missing := missing_log_libraries(spec.log):
        raise ConfigError("; ".join(missing))
    found: dict[str, Opener] = {}
    if spec.log.tensorboard:
        found["tensorboard"] = lambda step: TensorBoard(folder / "tensorboard", step)
    return found | {name: _tracker(name, spec, job_id, folder) for name in spec.log.trackers}


def _tracker(name: str, spec: ServiceJob, job_id: str, folder: Path) -> Opener:
    return lambda _step: TrackerProcess(name, spec, job_id, folder)


class TensorBoard:
    """`Logger` that writes event files."""

    def __init__(self, folder: Path, step: int) -> None:
        """Write into `folder`; readers discard rows of `step` and later that an earlier process wrote."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._writer = SummaryWriter(str(folder), purge_step=step)

    def log(self, row: Row) -> None:
        for name, value in row.metrics.items():
            self._writer.add_scalar(name, value, row.step)
        # Flush per row: a killed process must not lose rows.
        self._writer.flush()

    def close(self, end: RunEnd) -> None:
        del end  # event files do not say it
        self._writer.close()
