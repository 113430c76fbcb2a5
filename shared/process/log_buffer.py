"""The newest log lines of this process as text without secrets, until they are sent to the logs of jobs."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

MAX_BUFFERED = 500
"""Maximum number of lines that wait to be sent; beyond it the oldest are dropped and counted."""
MAX_TAKEN = 32
"""Maximum number of lines sent at once."""
MAX_CHARACTERS = 2_000
"""Maximum length of a line; the rest is cut."""
_HIDDEN = "***"
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_ACCESS_TOKEN = re.compile(r"\brlb_[\w.-]+")
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
        """Retain a line, and return it unchanged."""
        fields = " ".join(f"{name}={value}" for name, value in line.items() if name not in _OMITTED)
        text = self._without_secrets(f"{line.get('level', 'info')} {line.get('event', '')} {fields}".rstrip())
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

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return _ACCESS_TOKEN.sub(_HIDDEN, _URL_LOGIN.sub(_HIDDEN, text))


BUFFER = LogBuffer()
"""The buffer of this process, for which logging is global."""
