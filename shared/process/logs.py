"""Structured logs: one line per event with ids as fields, as JSON or for the console."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple, TextIO, cast

import stamina
import structlog

# --- The newest log lines of this process as text without secrets, until they are sent to the logs of jobs ------------


MAX_BUFFERED = 500
"""Maximum number of lines that wait to be sent; beyond it the oldest are dropped and counted."""
MAX_TAKEN = 32
"""Maximum number of lines sent at once."""
MAX_CHARACTERS = 2_000
"""Maximum length of a line; the rest is cut."""
_HIDDEN = "***"
_URL_LOGIN = re.compile(r"(?<=://)(?!\[:PASSWORD@)[^/\s@]*:[^/\s@]*(?=@)")
"""Of a URL, but not of `redis://[:PASSWORD@]HOST`, which error texts ask for."""
_ACCESS_TOKEN = re.compile(r"\brlb_[\w.-]+")
IN_EVENTS = "_in_events"
"""Marks a line of an event that is also appended to the job's events, which its log shows, too."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could control a terminal; JSON escapes it anyway."""
_OMITTED = frozenset({"event", "level", "timestamp", "service", "job"})


class LogLine(NamedTuple):
    """One line; `job` is the job that it names, empty if none."""

    job: str
    at: float
    text: str


class LogBuffer:
    """A processor of structlog that retains the lines that it sees."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=MAX_BUFFERED)
        self._secrets: tuple[str, ...] = ()
        self._n_dropped = 0

    def hide(self, secrets: Iterable[str]) -> None:
        """Replace these texts in all later lines, as passwords in URLs and access tokens are replaced anyway."""
        self._secrets = tuple(secret for secret in secrets if secret)

    def __call__(self, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Retain a line, unless it is of an event that the job's log has anyway; return it without that mark."""
        if line.pop(IN_EVENTS, False):
            return line
        fields = " ".join(f"{name}={value}" for name, value in line.items() if name not in _OMITTED)
        text = self.without_secrets(f"{line.get('level', 'info')} {line.get('event', '')} {fields}".rstrip())
        if len(self._lines) == MAX_BUFFERED:
            self._n_dropped += 1
        self._lines.append(LogLine(str(line.get("job") or ""), time.time(), text[:MAX_CHARACTERS]))
        return line

    def take(self) -> list[LogLine]:
        """Remove and return the oldest lines, at most `MAX_TAKEN`, and a line that counts those dropped before."""
        taken = [self._lines.popleft() for _ in range(min(MAX_TAKEN, len(self._lines)))]
        if taken and self._n_dropped:
            text = f"warning log_lines_dropped lines={self._n_dropped}"
            taken, self._n_dropped = [taken[0]._replace(text=text), *taken], 0
        return taken

    def without_secrets(self, text: str) -> str:
        """Return a text in which each secret is replaced."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return _ACCESS_TOKEN.sub(_HIDDEN, _URL_LOGIN.sub(_HIDDEN, text))


BUFFER = LogBuffer()
"""The buffer of this process, for which logging is global."""


# --- Structured logs --------------------------------------------------------------------------------------------------


_OUTAGES = frozenset({"redis_unavailable", "weight_store_unavailable"})
_OUTAGE_INTERVAL_S = 5.0


def to_standard_error() -> None:
    """Send structlog's lines to standard error, in a process whose standard output is for programs."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())))


def configure(service: str, *, level: str = "info", form: str = "json", secrets: Iterable[str] = ()) -> None:
    """Send structlog and the standard library's loggers to standard error, `service` on every line, without `secrets`.

    Each line is also retained in `BUFFER`.
    """
    BUFFER.hide(secrets)

    def with_service(_logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        line.setdefault("service", service)  # not a context variable, which threads do not inherit
        return line

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        with_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _Repeated(),
        BUFFER,
    ]
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )

    def renderer(logger: object, method: str, line: structlog.typing.EventDict) -> str:
        if form == "console":
            line = {_escaped(name): _escaped(value) for name, value in line.items()}
        return BUFFER.without_secrets(str(render(logger, method, line)))

    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
    stamina.instrumentation.set_on_retry_hooks([_log_retry])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def _escaped(value: Any) -> Any:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], value) if isinstance(value, str) else value


class _Repeated:
    """Drops most lines of an outage: of the same event about the same operation, one in each interval is enough."""

    def __init__(self) -> None:
        self._last: dict[tuple[object, object], float] = {}

    def __call__(self, _logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if line.get("event") in _OUTAGES:
            key, now = (line.get("event"), line.get("during")), time.monotonic()
            if now - self._last.get(key, -math.inf) < _OUTAGE_INTERVAL_S:
                raise structlog.DropEvent
            self._last[key] = now
        return line


class _StandardError:
    """The process's present standard error; drops lines that cannot be written, as when it is a file on a full disk."""

    @staticmethod
    def write(text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    @staticmethod
    def flush() -> None:
        with suppress(OSError):
            sys.stderr.flush()


def _log_retry(details: stamina.instrumentation.RetryDetails) -> None:
    if details.retry_num == 1 or details.retry_num % 10 == 0:
        cause = str(details.caused_by) or repr(details.caused_by)
        structlog.get_logger(__name__).warning("retrying", cause=cause, tries=details.retry_num)
