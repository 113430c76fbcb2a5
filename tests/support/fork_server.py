"""Starts services, ranks and the command line without the seconds that their imports take: forks them.

Tests of starting itself (the command line, a demo that is stopped, a worker that joins by hand) do not use it: they
start Python as users do.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import megatron_cpu
from tests.support.fork_channel import ForkClient
from tests.support.forking import ForkingPopen, is_forkable

_START_LIMIT_S = 400.0
_OUTPUT_LIMIT_S = 60.0
"""From the end of its output to its own."""
_MAX_SERVERS = 3
"""Tests whose environment differs in what imports may depend on get a server of their own, up to this number."""

_servers: list[TestForkServer] = []


class ForkedProcess:
    """A forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._read_exit_code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        code = self._read_exit_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _read_exit_code(self, limit_s: float | None) -> int | None:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], limit_s)[0]:
                return None
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode


class TestForkServer(ForkClient):
    """A server of this test process, which runs until that ends."""

    __test__ = False

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it, and wait until it has imported everything."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, env)
        with theirs:
            # Not bound to the thread that starts it, which may be one of a test.
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    **self._env,
                    "PYTHONPATH": megatron_cpu.python_path(),
                    "PYTHONUNBUFFERED": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        atexit.register(process.wait)
        atexit.register(process.kill)
        assert self.is_ready(_START_LIMIT_S), "the fork server has ended: its standard error says why"

    def start_module(
        self,
        module: str,
        env: Mapping[str, str],
        *arguments: str,
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
        dies_with_caller: bool = True,
    ) -> ForkedProcess:
        """Return a process that does what `python -m MODULE ARGUMENTS` would, with these descriptors."""
        with Path(os.devnull).open("rb") as nothing:
            pid = self.fork(
                [sys.executable, "-m", module, *arguments],
                env,
                stdin=nothing.fileno() if stdin is None else stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                cwd=cwd,
                dies_with_caller=dies_with_caller,
            )
        assert pid is not None, f"the fork server did not start {module}: its standard error says why"
        return ForkedProcess(pid)


def fork_server(env: Mapping[str, str]) -> TestForkServer | None:
    """Return the server for processes with these variables; None off Linux, or when there are too many servers."""
    found = next((server for server in _servers if server.fits(env)), None)
    if found is None and sys.platform == "linux" and len(_servers) < _MAX_SERVERS:
        found = TestForkServer(env)
        _servers.append(found)
    return found


def output_of(module: str, env: Mapping[str, str], *arguments: str) -> bytes:
    """Return what `python -m MODULE ARGUMENTS` prints, run without its imports where that is possible."""
    forks = fork_server(env)
    if forks is None:
        return subprocess.check_output([sys.executable, "-m", module, *arguments], env=env)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as out:
        with os.fdopen(write, "wb") as printed:
            process = forks.start_module(module, env, *arguments, stdout=printed.fileno())
        output = out.read()
    assert process.wait(_OUTPUT_LIMIT_S) == 0, f"{module} {' '.join(arguments)}: its standard error says why"
    return output


def popen_command(command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Begin a command, its output in pipes, without its imports where that is possible."""
    popen: type[subprocess.Popen[str]] = subprocess.Popen
    forks = fork_server(env)
    if forks is not None:
        ForkingPopen.forks, popen = forks, ForkingPopen
    return popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=env)


def popen_module(
    module: str, env: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Begin `python -m MODULE` in a session of its own, without its imports where that is possible."""
    forks = fork_server(env)
    if forks is not None:
        return forks.start_module(module, env, stdin=stdin, stdout=stdout, stderr=stderr)
    command = [sys.executable, "-m", module]
    return subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def popen_rank(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int,
    stdout: int,
    pass_fds: Sequence[int],
    start_new_session: bool,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Do what `subprocess.Popen` does for `LocalRanks`, with a forked process where that is possible."""
    forks = fork_server(env) if is_forkable(command, env) else None
    if forks is None:
        return subprocess.Popen(
            command, env=env, stdin=stdin, stdout=stdout, pass_fds=pass_fds, start_new_session=start_new_session
        )
    with Path(os.devnull).open("wb") as nothing:
        return forks.start_module(
            command[2],
            env,
            *command[3:],
            stdout=nothing.fileno() if stdout == subprocess.DEVNULL else stdout,
            pass_fds=pass_fds,
            dies_with_caller=False,  # a rank ends when its trainer's socket does
        )
