"""Functions of the user's that a job file names and that run in the trainer's own process."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.reward_call import load, why_not

_changed_at: dict[str, int] = {}
"""Module -> when its file had changed last when it was read, in nanoseconds."""


def own_function(field: str, path: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Return the function `package.module:function`, which runs the user's code.

    Where its file has changed since, the module is read again; those that it imports are not.

    Args:
        field: of the job file, for the errors.
        path: the function's.
        arguments: what it will be given, by position; the names are for the errors.

    Raises:
        ConfigError: it cannot be imported, is no function, or does not take these arguments.

    """
    try:
        _read_again_if_changed(path.partition(":")[0])
        function = load(path)
    except Exception as error:
        raise ConfigError(f"{field}: {why_not(path, 'function', error)}") from error
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some written in C have none
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{field}: {path} takes {signature}, but is called with ({', '.join(arguments)}): {error}"
        ) from error
    return function


def _read_again_if_changed(name: str) -> None:
    module = sys.modules.get(name) or importlib.import_module(name)
    if (file := getattr(module, "__file__", None)) is None:
        return
    changed_at = Path(file).stat().st_mtime_ns
    if _changed_at.setdefault(name, changed_at) != changed_at:
        _changed_at[name] = changed_at
        importlib.reload(module)
