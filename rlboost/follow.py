"""Follow a job: yield its changes as values, and format them as lines."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import httpx

from rlboost.client import Client, ClientError

ENDED = frozenset({"completed", "failed", "cancelled"})

_POLL_S = 0.5
_LONG_WAIT_S = 5.0
"""Every step waits briefly for samples and weights; only longer waits are shown."""
_LAST_WORDS_S = 5.0
"""How long to read remaining warnings after a job has ended."""
_WARNINGS = frozenset({"warning", "warning_cleared"})
"""Kinds of events that are shown."""
_SHOWN = ("reward/mean", "perplexity", "completions/mean_length", "perf/tokens_per_s")


def follow(client: Client, job_id: str) -> Iterator[tuple[Literal["job", "step", "wait", "warning"], Any]]:
    """Yield a job's changes until it has ended: its record, each finished step, long wait and warning once.

    Polls the job, and reads the event stream for warnings only, so it survives restarts of the manager.

    Raises:
        ClientError: the manager was unavailable for longer than the client's patience, or has no such job.

    """
    next_step, waits, warnings = 0, _LongWaits(), _Warnings(client, job_id)
    while True:
        job = client.jobs.show(job_id)
        yield "job", job
        for text in warnings.new(wait_s=_LAST_WORDS_S if job["state"] in ENDED else 0.0):
            yield "warning", text
        if job["step"] > next_step or job["state"] in ENDED:
            for row in client.jobs.metrics(job_id):
                if row["step"] >= next_step:
                    next_step = row["step"] + 1
                    yield "step", row
        if job["state"] in ENDED:
            return
        if waits.is_news(job["waiting"], time.monotonic()):
            yield "wait", job["waiting"]
        time.sleep(_POLL_S)


class _Warnings:
    """Reads a job's events in a thread until the job has ended."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A daemon thread, so that the process can exit without waiting for an event.
        self._thread = threading.Thread(target=self._listen, name=f"warnings-{job_id}", daemon=True)
        self._thread.start()

    def new(self, *, wait_s: float) -> list[str]:
        """Return warnings since the last call, after waiting at most `wait_s` for the stream to end."""
        self._thread.join(wait_s)
        return [self._came.get() for _ in range(self._came.qsize())]

    def _listen(self) -> None:
        try:
            for event in self._client.jobs.events(self._job_id):
                if event.kind in _WARNINGS:
                    self._came.put(str(event.data["fields"]["text"]))
        except (ClientError, httpx.HTTPError, RuntimeError):
            return  # polling the job fails in the same way and reports it; or the client is closed


class _LongWaits:
    """Reports each long wait once; a changed reason is still the same wait."""

    def __init__(self) -> None:
        self._for: str | None = None
        self._since = 0.0
        self._reported = False

    def is_news(self, wait: Mapping[str, Any] | None, now: float) -> bool:
        for_ = wait["for"] if wait else None
        if for_ != self._for:
            self._for, self._since, self._reported = for_, now, False
        if for_ is None or self._reported or now - self._since < _LONG_WAIT_S:
            return False
        self._reported = True
        return True


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """Format a finished step as one line: the main metrics, and all of the evaluation."""
    names = [name for name in _SHOWN if name in row] + sorted(name for name in row if name.startswith("eval/"))
    place = f"step {row['step'] + 1:>4}/{steps}" if row["step"] < steps else "after the last step" if steps else "done"
    return "  ".join([place, *(f"{name} {row[name]:.4g}" for name in names)])


def warning_line(job_id: str, text: str) -> str:
    """Format a warning as a line for standard error."""
    return f"rlboost: {job_id}: warning: {text}"


def wait_line(wait: Mapping[str, Any]) -> str:
    """Format a wait as one line."""
    limit = f", for {wait['limit_s']:.0f} s at most" if wait.get("limit_s") else ""
    return f"waiting for {wait['for']} because {wait['because']}, since {wait['since']}{limit}"
