"""Run untrusted Python in isolation, with resource limits and a hard kill.

An isolated program is one process without a network. It can read Python and its libraries, and no other file of the
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from rlboost.rewards import sandbox_child
from rlboost.rewards.isolation import Isolation, bubblewrap_command, landlock_request
from rlboost.rewards.syscalls import program_filter

_SHOWN_BYTES = 1_000_000
_PROBE_LIMIT_S = 20.0
_MAX_OPEN_FILES = 256


class SandboxUnavailable(RuntimeError):
    """No isolation works on this machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """CPU time of all its threads, seconds."""
    memory_bytes: int = 512 << 20
    """Address space."""
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
    completed: bool = False
    """True if the program and its epilogue ran to their last statements."""


def run(program: str, stdin: str = "", limits: Limits = Limits(), *, isolated: bool = True, epilogue: str = "") -> Ran:
    """Run a Python program and wait for its exit.

    Args:
        program: source code.
        stdin: text of its standard input.
        limits: resource limits.
        isolated: False applies only the limits: the program may do what this process's user may do, and processes that
            it starts in their own sessions may outlive it.
        epilogue: source code that runs in the program's module after its last statement. The program's process receives
            it only then.

    Raises:
        SandboxUnavailable: it cannot be isolated.

    """
    return run_with(available_isolation() if isolated else Isolation.NONE, program, stdin, limits, epilogue)


@lru_cache(maxsize=1)
def available_isolation() -> Isolation:
    """Return the best isolation that works on this machine.

    Raises:
        SandboxUnavailable: none works.

    """
    reasons = []
    for isolation in (Isolation.BUBBLEWRAP, Isolation.LANDLOCK):
        try:
            ran = run_with(isolation, "", limits=Limits(wall_s=_PROBE_LIMIT_S))
        except (ImportError, OSError) as error:
            reasons.append(f"{isolation}: {error}")
            continue
        if ran.completed and ran.code == 0:
            return isolation
        reasons.append(f"{isolation}: {ran.errors.strip() or f'exit code {ran.code}'}")
    raise SandboxUnavailable(
        f"this machine cannot isolate a program ({'; '.join(reasons)}): install bubblewrap and allow user namespaces, "
        "or use a kernel with Landlock (Linux 5.13); the argument isolated: false runs programs without isolation, for "
        "machines that have nothing to protect"
    )


def run_with(isolation: Isolation, program: str, stdin: str = "", limits: Limits = Limits(), epilogue: str = "") -> Ran:
    """Run a program as `run` does, in a given isolation.

    Raises:
        ImportError: system calls cannot be filtered.
        OSError: the isolation's program is missing.

    """
    # Output goes into files, so that the file size limit applies.
    with (
        tempfile.TemporaryDirectory() as work,
        _file(stdin.encode(errors="replace")) as standard_input,
        _file() as output,
        _file() as errors,
        _file(program_filter(in_namespaces=True) if isolation is Isolation.BUBBLEWRAP else b"") as allowed,
    ):
        request = {
            "program": program,
            "limits": _resource_limits(limits),
            "confine": landlock_request(work) if isolation is Isolation.LANDLOCK else None,
        }
        parent = os.getpid()
        wrapper = []
        if isolation is Isolation.BUBBLEWRAP:
            parent = 0  # bubblewrap ends with us, and the program with it
            wrapper = bubblewrap_command(work, limits.file_bytes, allowed.fileno())
        channel, other_end = socket.socketpair()
        with channel:
            with other_end:
                descriptor = other_end.fileno()
                child = subprocess.Popen(  # noqa: S603 - our own script
                    [*wrapper, sys.executable, "-I", "-B", "-c", _script(), str(descriptor), str(parent)],
                    stdin=standard_input,
                    stdout=output,
                    stderr=errors,
                    pass_fds=[descriptor, allowed.fileno()],
                    cwd=work,
                    start_new_session=True,
                    env={"PATH": os.defpath, "HOME": work, "OMP_NUM_THREADS": "1"},
                )
            completed, timed_out = _wait(child, channel, limits.wall_s, request, epilogue)
        code = child.returncode
        return Ran(128 - code if code < 0 else code, _text(output), _text(errors), timed_out, completed)


def _resource_limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }


def _wait(
    child: subprocess.Popen[bytes], channel: socket.socket, wall_s: float, request: dict[str, Any], epilogue: str
) -> tuple[bool, bool]:
    """Wait for the program's end or kill it; return whether it completed, and whether it timed out."""
    timed_out = threading.Event()

    def time_out() -> None:
        timed_out.set()
        _kill(child)
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)  # a process that escaped the kill may have the other end

    timer = threading.Timer(wall_s, time_out)
    timer.start()
    try:
        completed = _exchange(channel, request, epilogue)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        timer.cancel()
        timer.join()
        _kill(child)  # it is not reaped yet, so its process group is still its own
        child.wait()
    return completed, timed_out.is_set()


def _exchange(channel: socket.socket, request: dict[str, Any], epilogue: str) -> bool:
    """Send the request, and the epilogue after the program's last statement; return True if both completed."""
    word = secrets.token_hex(16)
    try:
        channel.sendall(json.dumps(request).encode() + b"\n")
        if not channel.recv(1):
            return False
        channel.sendall(json.dumps([epilogue, word]).encode() + b"\n")
        return channel.recv(len(word), socket.MSG_WAITALL) == word.encode()
    except OSError:
        return False  # the program has ended


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@lru_cache(maxsize=1)
def _script() -> str:
    return Path(sandbox_child.__file__).read_text(encoding="utf-8")


def _file(content: bytes = b"") -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_SHOWN_BYTES).decode(errors="replace")
