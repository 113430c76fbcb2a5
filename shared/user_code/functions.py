"""User functions named in a job file that run in the trainer's process."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlboost.shared.errors import ConfigError
from rlboost.shared.user_code.allowed import check_module
from rlboost.shared.user_code.reward_call import describe_import_error, load

_mtimes: dict[str, int] = {}
"""Module -> modification time of its file when it was last imported, in nanoseconds."""


def load_user_function(field: str, path: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import and return the function `package.module:function`; this runs the user's code.

    A module whose file has changed since is reloaded; the modules that it imports are not.

    Args:
        field: the field of the job file, for errors.
        path: the function's path.
        arguments: names of the function's positional arguments, for errors.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take these arguments.

    """
    try:
        check_module(path.partition(":")[0])
        _reload_if_changed(path.partition(":")[0])
        function = load(path)
    except Exception as error:
        raise ConfigError(f"{field}: {describe_import_error(path, 'function', error)}") from error
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{field}: {path} takes {signature}, but is called with ({', '.join(arguments)}): {error}"
        ) from error
    return function


def _reload_if_changed(name: str) -> None:
    module = sys.modules.get(name) or importlib.import_module(name)
    if (file := getattr(module, "__file__", None)) is None:
        return
    mtime = Path(file).stat().st_mtime_ns
    if _mtimes.setdefault(name, mtime) != mtime:
        _mtimes[name] = mtime
        importlib.reload(module)
