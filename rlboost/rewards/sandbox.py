"""Runs Python that nobody has read: without a network, with limits, and killed hard.

The program is in namespaces of its own: no network, no other processes, the whole file system read-only but for an
empty folder in memory, which is its working directory. It sees the files that its user can read. Linux 5.12 or newer
that lets users make namespaces; elsewhere it is refused, unless `isolated=False` is asked for.
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
    """The kernel does not let this user shut a program in."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """Of processor time, each process."""
    memory_bytes: int = 512 << 20
    """Of address space, each process."""
    file_bytes: int = 16 << 20
    """Of one file, of its output, and of all its files together."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program."""

    code: int
    """Its exit code, or 128 and the signal that ended it."""
    output: str
    errors: str
    timed_out: bool = False


def run(program: str, stdin: str = "", limits: Limits = Limits(), *, isolated: bool = True) -> Ran:
    """Run a Python program and wait for its end.

    Args:
        program: its source.
        stdin: what it can read.
        limits: what it may use.
        isolated: False leaves it the network and the file system, with the limits alone; a process that it starts in
            a session of its own may then outlive it. For machines that forbid namespaces and are closed themselves.

    Raises:
        SandboxUnavailable: it cannot be shut in.

    """
    if isolated:
        probe()
    return _run(program, stdin, limits, isolated=isolated)


@lru_cache(maxsize=1)
def probe() -> None:
    """Try whether a program can be shut in.

    Raises:
        SandboxUnavailable: it cannot.

    """
    # Only a program of our own is believed when it says so.
    ran = _run("", "", Limits(wall_s=_PROBE_LIMIT_S), isolated=True)
    if ran.code != 0:
        raise SandboxUnavailable(
            f"this machine does not let a program be shut in ({ran.errors.strip() or f'exit code {ran.code}'}): allow "
            "unprivileged user namespaces here (in a container: its seccomp profile, too), or give the argument "
            "isolated: false where the machine itself is closed"
        )


def _run(program: str, stdin: str, limits: Limits, *, isolated: bool) -> Ran:
    # In files, so that a limit holds for them.
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        asked = {
            "program": program,
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
