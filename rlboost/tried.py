"""The user's own code, tried as a service will use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 60.0


class NotHere(str):
    """A problem that is none where the trainer looks from another folder, or on another machine."""

    __slots__ = ()


def complaint(field: str, function: str, script: str, *arguments: str) -> str | None:
    """Run a script that imports a function of the user; return what is wrong with it, None if nothing is.

    It runs in a process of its own, which finds modules in the current folder: the user's code may be slow, print, or
    hold on to anything.

    Args:
        field: of the job file, which names the function.
        function: what the field says.
        script: Python, whose last line on standard error says what is wrong, field first.
        arguments: what the script finds in `sys.argv`.

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
    except subprocess.TimeoutExpired:
        return f"{field}: importing {function} took more than {_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    # What is run when a process ends may have written, too.
    told = next((line for line in reversed(lines) if line.startswith(f"{field}: ")), None)
    if told is None:
        return f"{field}: importing {function} ended its process" + (f": {lines[-1]}" if lines else "")
    return NotHere(told) if "ModuleNotFoundError: " in told else told
