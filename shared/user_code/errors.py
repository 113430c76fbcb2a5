"""Describes errors of user code for its author: where it was raised, and with which data row."""

from __future__ import annotations

import reprlib
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

MAX_CHARS = 4_000
"""Descriptions are cut to this length."""
_MESSAGE_CHARS = 500
_ROW_CHARS = 600
_MAX_FRAMES = 12
_LINE_CHARS = 300
_HOSTS = ("rlboost.services.", "rlboost.shared.")
"""Packages whose functions call user code."""
_STDLIB = sysconfig.get_path("stdlib")
_SITE = "site-packages"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = 3


def describe_error(error: BaseException, row: Mapping[str, Any] | None = None) -> str:
    r"""Return the error and its place in the first line, then the data row, then the traceback of user code.

    Such as `ValueError: boom (sums/reward.py:7)\nrow: prompt='2+2='\nTraceback ...`. The frames that called the user
    code are left out.

    Args:
        error: raised by user code.
        row: the data that it was called with; long values are shortened.

    """
    called = _user_part(error.__traceback__)
    lines = [_headline(error, called)]
    if row:
        lines.append(describe_row(row))
    if called is not None:
        shown = traceback.TracebackException(type(error), error, called, limit=-_MAX_FRAMES)
        lines += [line[:_LINE_CHARS] for line in "".join(shown.format()).rstrip().splitlines()]
    return "\n".join(lines)[:MAX_CHARS].encode(errors="backslashreplace").decode()


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a data row as one line; long values are shortened."""
    return "row: " + ", ".join(f"{name}={describe_value(value)}" for name, value in row.items())[:_ROW_CHARS]


def describe_value(value: object) -> str:
    """Return a value for its author, shortened; also if it cannot be formatted."""
    try:
        return _short.repr(value).encode(errors="backslashreplace").decode()
    except Exception as broken:  # noqa: BLE001 - the user's class may raise anything
        return f"a {type(value).__name__} (it cannot be formatted: {type(broken).__name__})"


def place_of(error: BaseException) -> str:
    """Return `file:line` where user code raised the error, an empty text if it did not."""
    return _place(_user_part(error.__traceback__))


def _headline(error: BaseException, called: TracebackType | None) -> str:
    try:
        message = " ".join(str(error).split())[:_MESSAGE_CHARS]
    except Exception as broken:  # noqa: BLE001 - the user's class may raise anything
        message = f"(its message cannot be formatted: {type(broken).__name__})"
    place = _place(called)
    return f"{type(error).__name__}: {message}" + (f" ({place})" if place else "")


def _user_part(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of user code on, None if there is none."""
    while tb is not None and (_is_host(tb.tb_frame) or _is_stdlib(tb.tb_frame)):
        tb = tb.tb_next
    return tb


def _place(tb: TracebackType | None) -> str:
    """Return the file and line of the innermost frame that is no library's."""
    places = [(frame, line) for frame, line in traceback.walk_tb(tb) if not (_is_host(frame) or _is_library(frame))]
    places = places or list(traceback.walk_tb(tb))
    if not places:
        return ""
    frame, line = places[-1]
    file = Path(frame.f_code.co_filename)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


def _is_host(frame: FrameType) -> bool:
    if frame.f_code.co_filename == "<string>":  # a program given to `python -c`
        return True
    spec = frame.f_globals.get("__spec__")  # a process's main module has no other name
    return str(spec.name if spec is not None else frame.f_globals.get("__name__")).startswith(_HOSTS)


def _is_stdlib(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_STDLIB, "<frozen ")) and _SITE not in file


def _is_library(frame: FrameType) -> bool:
    return _is_stdlib(frame) or _SITE in frame.f_code.co_filename
