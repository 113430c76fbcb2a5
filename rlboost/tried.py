"""The user's own code, tried as a service will use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shared.errors import ConfigError

_LIMIT_S = 60.0


def complaints(field: str, function: str, script: str, *arguments: str) -> list[str]:
    """Run a script that imports a function of the user; return its last words if it fails, a line each, else nothing.

    It runs in a process of its own, which finds modules in the current folder: the user's code may be slow, print, or
    hold on to anything.

    Args:
        field: of the job file, which names the function.
        function: what the field says.
        script: Python.
        arguments: what the script finds in `sys.argv`.

    Raises:
        ConfigError: it takes too long.

    """
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(  # noqa: S603 - our own script; the user's module is what is to be tried
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{field}: importing {function} took more than {_LIMIT_S:.0f} s") from error
    if done.returncode == 0:
        return []
    return done.stderr.strip().splitlines() or ["it exited without a message"]
