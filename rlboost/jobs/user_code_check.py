"""Load user code in a separate process, as a service will, and report what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

_LIMIT_S = 60.0
MAY_WORK_THERE = 3
"""Exit code of a script for a problem that the trainer's machine may not have."""


class MissingHere(str):
    """A missing file or module, which may exist in the trainer's folder or on its machine."""

    __slots__ = ()


def complaint(field: str, function: str, script: str, *arguments: str, more_s: float = 0.0) -> str | None:
    """Run a script that imports and tries a user function; return the problem, None if there is none.

    Uses a separate process with the current folder on its path: user code may be slow, print, or hold resources.

    Args:
        field: the job file's field that names the function.
        function: the field's value.
        script: Python code whose last line on standard error is the problem, which begins with a field of that section.
        arguments: passed in `sys.argv`.
        more_s: how long the script may take beyond its imports.

    """
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    limit_s = _LIMIT_S + more_s
    with TemporaryFile() as stderr:  # not a pipe, which a process that the user's code leaves running would hold open
        try:
            done = subprocess.run(  # noqa: S603 - our own script; the user's module is what is to be tried
                [sys.executable, "-c", script, *arguments],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return MissingHere(f"{field}: trying {function} took more than {limit_s:.0f} s")
        if done.returncode == 0:
            return None
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    # Exit handlers may have written after it.
    section = field.partition(".")[0] + "."
    reported = next((line for line in reversed(lines) if line.startswith(section)), None)
    if reported is None:
        return f"{field}: trying {function} ended its process" + (f": {lines[-1]}" if lines else "")
    is_missing = "ModuleNotFoundError: " in reported or done.returncode == MAY_WORK_THERE
    return MissingHere(reported) if is_missing else reported
