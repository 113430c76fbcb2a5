"""Load user code in a separate process, as a service will, and report what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 60.0


class MissingHere(str):
    """A missing file or module, which may exist in the trainer's folder or on its machine."""

    __slots__ = ()


def complaint(field: str, function: str, script: str, *arguments: str) -> str | None:
    """Run a script that imports a user function; return the problem, None if there is none.

    Uses a separate process with the current folder on its path: user code may be slow, print, or hold resources.

    Args:
        field: the job file's field that names the function.
        function: the field's value.
        script: Python code whose last line on standard error is the problem, beginning with the field.
        arguments: passed in `sys.argv`.

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
    # Exit handlers may have written after it.
    reported = next((line for line in reversed(lines) if line.startswith(f"{field}: ")), None)
    if reported is None:
        return f"{field}: importing {function} ended its process" + (f": {lines[-1]}" if lines else "")
    return MissingHere(reported) if "ModuleNotFoundError: " in reported else reported
