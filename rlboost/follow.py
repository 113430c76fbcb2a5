"""Following a job: what is new about it, as values, and as lines for people."""

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
"""Every step waits a little for samples and for weights; only what lasts is news."""
_LAST_WORDS_S = 5.0
"""How long a job that has ended is listened to for warnings that were given before."""
_SHOWN = ("reward/mean", "perplexity", "completions/mean_length", "perf/tokens_per_s")


def follow(client: Client, job_id: str) -> Iterator[tuple[Literal["job", "step", "wait", "warning"], Any]]:
    """Yield what is new about a job until it has ended: its record, each finished step, long wait and warning once.

    It asks again and again, and reads the event stream for warnings alone, so it goes on over any restart of the
    manager.

    Raises:
        ClientError: the manager was away for longer than the client's patience, or knows no such job.

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
    """Listens to a job's events, in a thread of its own, until the job has ended."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A daemon: who is no longer interested waits for no event.
        self._thread = threading.Thread(target=self._listen, name=f"warnings-{job_id}", daemon=True)
        self._thread.start()

    def new(self, *, wait_s: float) -> list[str]:
        """Return what came since this was asked last; wait so long at most for the end of the events."""
        self._thread.join(wait_s)
        return [self._came.get() for _ in range(self._came.qsize())]

    def _listen(self) -> None:
        try:
            for event in self._client.jobs.events(self._job_id):
                if event.kind == "warning":
                    self._came.put(str(event.data["fields"]["text"]))
        except (ClientError, httpx.HTTPError, RuntimeError):
            return  # asking for the job meets the same trouble and tells it; or the client is closed


class _LongWaits:
    """Tells once of each wait that lasts; a changed reason is still the same wait."""

    def __init__(self) -> None:
        self._for: str | None = None
        self._since = 0.0
        self._told = False

    def is_news(self, wait: Mapping[str, Any] | None, now: float) -> bool:
        for_ = wait["for"] if wait else None
        if for_ != self._for:
            self._for, self._since, self._told = for_, now, False
        if for_ is None or self._told or now - self._since < _LONG_WAIT_S:
            return False
        self._told = True
        return True


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """Return a finished step as one line: the metrics that people look at first, and all of the evaluation."""
    names = [name for name in _SHOWN if name in row] + sorted(name for name in row if name.startswith("eval/"))
    place = f"step {row['step'] + 1:>4}/{steps}" if row["step"] < steps else "after the last step" if steps else "done"
    return "  ".join([place, *(f"{name} {row[name]:.4g}" for name in names)])


def warning_line(job_id: str, text: str) -> str:
    """Return a warning as a line of standard error."""
    return f"rlboost: {job_id}: warning: {text}"


def wait_line(wait: Mapping[str, Any]) -> str:
    """Return a wait as one line."""
    limit = f", for {wait['limit_s']:.0f} s at most" if wait.get("limit_s") else ""
    return f"waiting for {wait['for']} because {wait['because']}, since {wait['since']}{limit}"
