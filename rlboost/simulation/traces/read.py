"""Reads recorded spot traces. The format is recognized by the content.

- Events, as the Bamboo project publishes them: lines `time_ms,add,instance` and `time_ms,remove,instance`.
- Counts, as in a log of Google Cloud instances: lines `YYYY-mm-dd, HH:MM:SS, count`.
- Availability, as the SkyPilot project publishes it: `{"metadata": {"gap_seconds": 300}, "data": [count, ...]}`.

A log of counts does not tell which instance was reclaimed: it is taken to be the one available for longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.validation import first_error
from rlboost.simulation.traces.fleet_trace import FleetEvent, FleetTrace, first_problem

_EVENT = re.compile(r"(\d+),(add|remove),(\S+)")
_COUNT = re.compile(r"(\d{4}-\d\d-\d\d), ?(\d\d:\d\d:\d\d), ?(\d+)")


class _Metadata(BaseModel):
    gap_seconds: float = Field(gt=0)


class _Availability(BaseModel):
    metadata: _Metadata
    data: list[NonNegativeInt] = Field(min_length=1)


def read_trace(path: Path) -> FleetTrace:
    """Read a recorded trace.

    Raises:
        ConfigError: the file cannot be read, is empty, or is not a trace; names the line.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}: name a file that exists") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text: use CSV or JSON") from error
    if not text.strip():
        raise ConfigError(f"trace {path} is empty: record it again")
    if text.lstrip().startswith("{"):
        return _availability(path, text)
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _counts(path, lines) if _COUNT.fullmatch(lines[0][1]) else _event_lines(path, lines)


def _event_lines(path: Path, lines: list[tuple[int, str]]) -> FleetTrace:
    events = []
    for number, line in lines:
        if not (match := _EVENT.fullmatch(line)):
            raise ConfigError(f"trace {path}, line {number}: {line!r} is not of the form time_ms,add|remove,instance")
        events.append(FleetEvent(int(match[1]) / 1000, "add" if match[2] == "add" else "remove", match[3]))
    if found := first_problem(events):
        index, problem = found
        raise ConfigError(f"trace {path}, line {lines[index][0]}: {problem}")
    return FleetTrace(tuple(events), events[-1].at_s)


def _counts(path: Path, lines: list[tuple[int, str]]) -> FleetTrace:
    times_s: list[float] = []
    counts: list[int] = []
    began = None
    for number, line in lines:
        try:
            match = _COUNT.fullmatch(line)
            at = datetime.fromisoformat(f"{match[1]}T{match[2]}") if match else None
        except ValueError:  # e.g. month 13
            at = None
        if match is None or at is None:
            raise ConfigError(f"trace {path}, line {number}: {line!r} is not of the form YYYY-mm-dd, HH:MM:SS, count")
        began = began or at
        at_s = (at - began).total_seconds()
        if times_s and at_s < times_s[-1]:
            raise ConfigError(f"trace {path}, line {number}: {at} is before the previous line: sort the lines by time")
        times_s.append(at_s)
        counts.append(int(match[3]))
    return _trace_of_counts(zip(times_s, counts, strict=True), times_s[-1])


def _availability(path: Path, text: str) -> FleetTrace:
    try:
        found = _Availability.model_validate_json(text)
    except ValidationError as error:
        form = '{"metadata": {"gap_seconds": seconds}, "data": [count, ...]}'
        problem = first_error(error, "JSON")
        raise ConfigError(f"trace {path}: {problem}: it is not of the form {form}") from error
    gap_s = found.metadata.gap_seconds
    return _trace_of_counts(((i * gap_s, count) for i, count in enumerate(found.data)), len(found.data) * gap_s)


def _trace_of_counts(counts: Iterable[tuple[float, int]], duration_s: float) -> FleetTrace:
    events: list[FleetEvent] = []
    first, after_last = 1, 1  # numbers of the available instances
    for at_s, count in counts:
        while after_last - first > count:
            events.append(FleetEvent(at_s, "remove", f"instance-{first}"))
            first += 1
        while after_last - first < count:
            events.append(FleetEvent(at_s, "add", f"instance-{after_last}"))
            after_last += 1
    return FleetTrace(tuple(events), duration_s)
