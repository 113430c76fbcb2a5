"""Follow a job: yield its changes as values, and reconnect while the manager does not answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx

from rlboost.client import Client, ClientError
from rlboost.job_lines import phase_name
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import ENDED

OUTAGE_LIMIT_S = 600.0
"""How long to try again while the manager does not answer: longer than 'rlboost down' and 'up'."""
LAST_STEPS = 5
"""Steps to show of a job that has run before, if none is requested."""

Change = tuple[Literal["job", "step", "wait", "phase", "state", "warning", "lost", "back"], Any]

_POLL_S = 0.5
_LONG_WAIT_S = 5.0
"""Every step waits briefly for samples and weights; only longer waits are shown."""
_REPEAT_EVERY_S = 60.0
"""How often a lasting wait, or a phase without a wait, is shown, so that the log of a long step shows its progress."""
_LONG_OUTAGE_S = 2.0
"""A shorter outage, such as a new leader's start, is not shown."""
_REMAINING_WARNINGS_LIMIT_S = 5.0
"""How long to read remaining warnings after a job has ended."""
_WARNINGS = frozenset({"warning", "warning_cleared"})
"""Kinds of events that are shown."""


def follow(connect: Callable[[], Client], job_id: str, *, from_step: int | None = 0) -> Iterator[Change]:
    """Yield a job's changes until it has ended.

    - `job`: its record, at each poll.
    - `step`: each finished step's metrics, once.
    - `wait`: each long wait, once a minute.
    - `phase`: what the trainer does, after each minute of it, unless there is a wait.
    - `state`: paused, or running again.
    - `warning`: the text of each warning, once, also across restarts of the manager.
    - `lost`, `back`: an outage: `{since, because, limit_s}` and `{since, outage_s}`, `since` in Unix seconds.

    Args:
        connect: returns a client that does not retry; called again during an outage, so that it can find a system that
            has moved.
        job_id: the job.
        from_step: first step to yield, 0 for all; None for the last few.

    Raises:
        ClientError: the manager did not answer for `OUTAGE_LIMIT_S`, or it has no such job.
        ConfigError: the first connection: no system is known.

    """
    client, progress, warnings = connect(), Progress(from_step), _Warnings(job_id)
    warnings.listen(client)
    outage = _Outage(time.time())
    try:
        while True:
            try:
                job = client.jobs.show(job_id)
                next_step = progress.next_step(job)
                rows = client.jobs.metrics(job_id, next_step) if progress.needs_rows(job) else []
            except (ClientError, ConfigError) as error:
                if not is_outage(error):
                    raise
                failed_at, reason = time.time(), outage_reason(error)
                try:
                    client = _reconnected(connect, client, warnings)
                except ConfigError as ended:
                    reason = str(ended)
                yield from outage.on_failure(error, reason, failed_at)
                time.sleep(_POLL_S)
                continue
            yield from outage.on_answer(time.time())
            for text in warnings.new(wait_s=_REMAINING_WARNINGS_LIMIT_S if job["state"] in ENDED else 0.0):
                yield "warning", text
            yield from progress.changes(job, rows, time.monotonic())
            if job["state"] in ENDED:
                return
            time.sleep(_POLL_S)
    finally:
        warnings.close()
        client.close()


class _Outage:
    """The time since the manager's last answer: pure bookkeeping, in Unix seconds."""

    def __init__(self, now: float) -> None:
        self._answered_at = now
        self._is_shown = False

    def on_answer(self, now: float) -> Iterator[Change]:
        """Yield `back` if an outage that was shown has ended."""
        if self._is_shown:
            yield "back", {"since": self._answered_at, "outage_s": now - self._answered_at}
        self._answered_at, self._is_shown = now, False

    def on_failure(self, error: Exception, reason: str, now: float) -> Iterator[Change]:
        """Yield `lost` once for an outage that lasts.

        Raises:
            ClientError: it has lasted for `OUTAGE_LIMIT_S`.

        """
        outage_s = now - self._answered_at
        if outage_s > OUTAGE_LIMIT_S:
            raise ClientError(
                "No answer", f"the manager has not answered for {outage_s:.0f} s, the limit: {reason}"
            ) from error
        if not self._is_shown and outage_s >= _LONG_OUTAGE_S:
            self._is_shown = True
            yield "lost", {"since": self._answered_at, "because": reason, "limit_s": OUTAGE_LIMIT_S}


def _reconnected(connect: Callable[[], Client], client: Client, warnings: _Warnings) -> Client:
    """Replace the client.

    Raises:
        ConfigError: no system is known at present; the text says when and why the last one ended.

    """
    new = connect()
    client.close()
    warnings.listen(new)
    return new


def is_outage(error: Exception) -> bool:
    """Return True if the error may pass: no answer, no leader, or the token of a system that was restarted."""
    passing = (None, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.UNAUTHORIZED)
    return isinstance(error, ConfigError) or (isinstance(error, ClientError) and error.status in passing)


def outage_reason(error: Exception) -> str:
    """Return what to show of an outage."""
    return error.detail if isinstance(error, ClientError) else str(error)


class Progress:
    """What has been yielded of a job: pure bookkeeping."""

    def __init__(self, from_step: int | None) -> None:
        """Start before the first look; `from_step` None starts at the last few steps of that look."""
        self._next_step = from_step
        self._state = ""
        self._waits, self._phases = _Lasting(_LONG_WAIT_S), _Lasting(_REPEAT_EVERY_S)

    def next_step(self, job: Mapping[str, Any]) -> int:
        """Return the first step that has not been yielded."""
        if self._next_step is None:
            self._next_step = max(0, job["step"] - LAST_STEPS)
        return self._next_step

    def needs_rows(self, job: Mapping[str, Any]) -> bool:
        """Return True if rows of metrics are to be fetched."""
        return bool(job["step"] > self.next_step(job) or job["state"] in ENDED)

    def changes(self, job: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], now: float) -> Iterator[Change]:
        """Yield what is new in a job's record and its rows of metrics; `now` is monotonic seconds."""
        yield "job", job
        for row in rows:
            if row["step"] >= self.next_step(job):
                self._next_step = row["step"] + 1
                yield "step", row
        before, self._state = self._state, job["state"]
        if job["state"] in ENDED:
            return
        if before != self._state and "paused" in (before, self._state):
            yield "state", self._state
        wait, phase = job["waiting"], job.get("phase")
        if self._waits.is_news(wait["for"] if wait else None, now):
            yield "wait", wait
        if self._phases.is_news(phase_name(phase) if phase else None, now) and not wait:
            yield "phase", phase


class _Warnings:
    """Reads a job's events in a thread until the job has ended."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._client: Client
        self._last_id: str | None = None
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed = False
        # A daemon thread, so that the process can exit without waiting for an event.
        self._thread = threading.Thread(target=self._listen, name=f"warnings-{job_id}", daemon=True)

    def listen(self, client: Client) -> None:
        """Read with this client from now on."""
        self._client = client
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Let the thread end."""
        self._is_closed = True

    def new(self, *, wait_s: float) -> list[str]:
        """Return warnings since the last call, after waiting at most `wait_s` for the stream to end."""
        self._thread.join(wait_s)
        return [self._texts.get() for _ in range(self._texts.qsize())]

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                for event in self._client.jobs.events(self._job_id, self._last_id):
                    self._last_id = event.id or self._last_id
                    if event.kind in _WARNINGS:
                        self._texts.put(str(event.data["fields"]["text"]))
            except (httpx.HTTPError, RuntimeError):  # the client was closed: there may be a new one
                time.sleep(_POLL_S)
            except ClientError as error:
                if not is_outage(error):
                    return  # a manager without events: the job is polled all the same
                time.sleep(_POLL_S)
            else:
                return


class _Lasting:
    """Reports a wait or phase that lasts, and once a minute while it has the same name."""

    def __init__(self, first_s: float) -> None:
        """Report it for the first time after `first_s`."""
        self._first_s = first_s
        self._name: str | None = None
        self._report_at = 0.0

    def is_news(self, name: str | None, now: float) -> bool:
        """Return True if it is to be reported at this moment; None: there is none."""
        if name != self._name:
            self._name, self._report_at = name, now + self._first_s
        if name is None or now < self._report_at:
            return False
        self._report_at = now + _REPEAT_EVERY_S
        return True
