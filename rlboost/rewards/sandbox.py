"""Run untrusted Python without a network, with resource limits, and with a hard kill.

The program runs in its own namespaces: no network, no other processes, a read-only file system except for an empty
in-memory working directory. It can read the files that its user can read. Needs Linux 5.12 or newer with unprivileged
user namespaces; on other systems it is refused unless `isolated=False`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from rlboost.rewards import sandbox_child

_SHOWN_BYTES = 1_000_000
_PROBE_LIMIT_S = 20.0


class SandboxUnavailable(RuntimeError):
    """The kernel does not let this user isolate a program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """CPU time per process, seconds."""
    memory_bytes: int = 512 << 20
    """Address space per process."""
    file_bytes: int = 16 << 20
    """Limit of each file, of its output, and of all its files together."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program."""

    code: int
    """Its exit code, or 128 plus the signal that ended it."""
    output: str
    errors: str
    timed_out: bool = False


def run(program: str, stdin: str = "", limits: Limits = Limits(), *, isolated: bool = True, epilogue: str = "") -> Ran:
    """Run a Python program and wait for its exit.

    Args:
        program: source code.
        stdin: text of its standard input.
        limits: resource limits.
        isolated: False allows network and file system access and applies only the limits; a process that it starts in
            its own session may then outlive it. For machines that forbid namespaces and are isolated themselves.
        epilogue: source code that runs in the program's module after its last statement; no file has it, and it is
            read only then.

    Raises:
        SandboxUnavailable: it cannot be isolated.

    """
    if isolated:
        probe()
    return _run(program, stdin, limits, isolated=isolated, epilogue=epilogue)


@lru_cache(maxsize=1)
def probe() -> None:
    """Check that this machine can isolate a program.

    Raises:
        SandboxUnavailable: it cannot.

    """
    # Only our own program's claim is trusted.
    ran = _run("", "", Limits(wall_s=_PROBE_LIMIT_S), isolated=True)
    if ran.code != 0:
        raise SandboxUnavailable(
            f"this machine cannot isolate a program ({ran.errors.strip() or f'exit code {ran.code}'}): allow "
            "unprivileged user namespaces (in a container also in its seccomp profile), or pass the argument "
            "isolated: false where the machine itself is closed"
        )


def _run(program: str, stdin: str, limits: Limits, *, isolated: bool, epilogue: str = "") -> Ran:
    # In files, so that the file size limit applies.
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        asked = {
            "program": program,
            "epilogue": epilogue,
            "input": stdin,
            "work": work,
            "isolated": isolated,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
        }
        child = subprocess.Popen(  # noqa: S603 - our own script, which then shuts itself in
            [sys.executable, "-I", "-S", str(Path(sandbox_child.__file__))],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env={"PATH": os.defpath, "HOME": work, "OMP_NUM_THREADS": "1"},
        )
        timed_out = False
        try:
            child.communicate(json.dumps(asked).encode(), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        return Ran(128 - code if code < 0 else code, _text(output), _text(errors), timed_out)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_SHOWN_BYTES).decode(errors="replace")
