"""The client of the fork server: starts services without their imports, which `tests/support/forking.py` has done.

Tests of starting itself (the command line, a demo that is stopped, a worker that joins by hand) and of modules or
settings of their own do not use it: they start Python as users do.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import megatron_cpu
from tests.support.forking import NUMBER, SERVICES, Start, import_environment, is_forkable

_MODULES = (
    *(f"rlboost.services.{name}.__main__" for name in SERVICES),
    # What they import while they run.
    "rlboost.cli",
    "rlboost.local.foreground",
    "rlboost.services.rollout_worker.adapters.torch.engine",
    "rlboost.services.rollout_worker.api",
    "rlboost.services.trainer.adapters.fsdp.rank_engine",
    "rlboost.services.trainer.build",
    "rlboost.shared.weights.peers.blob_routes",
    "uvicorn.protocols.http.httptools_impl",
)
_START_LIMIT_S = 400.0
_FORK_LIMIT_S = 60.0
_MAX_SERVERS = 3
"""Tests whose environment differs in what imports may depend on get a server of their own, up to this number."""

_servers: list[ForkServer] = []


class ForkedProcess:
    """A forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, exit_pipe: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exit_pipe = exit_pipe

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
            with selectors.DefaultSelector() as selector:
                selector.register(self._exit_pipe, selectors.EVENT_READ)
                if not selector.select(limit_s):
                    return None
            answer = os.read(self._exit_pipe, NUMBER.size)
            os.close(self._exit_pipe)
            assert answer, f"the fork server has ended: the exit code of process {self.pid} is unknown"
            (self.returncode,) = NUMBER.unpack(answer)
        return self.returncode


class ForkServer:
    """Forks services, ranks and the command line. Constructing it takes as long as their imports."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start the server with these variables, and wait until it has imported everything."""
        self._import_environment = import_environment(env)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno()), *_MODULES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    **env,
                    "PYTHONPATH": megatron_cpu.python_path(),
                    "PYTHONUNBUFFERED": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        atexit.register(self._close)
        self._receive(_START_LIMIT_S)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return True if a process with these variables would have imported the same."""
        return import_environment(env) == self._import_environment

    def start(
        self,
        module: str,
        env: Mapping[str, str],
        *arguments: str,
        stdout: int = 1,
        stderr: int = 2,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Return a process that does what `python -m MODULE ARGUMENTS` would, with these descriptors."""
        with Path(os.devnull).open("rb") as nothing:
            start = Start(
                module, arguments, env, cwd=str(cwd or Path.cwd()), fds=[0, 1, 2, *pass_fds], new_session=new_session
            )
            fds = [nothing.fileno(), stdout, stderr, *pass_fds]
            exit_pipe, theirs = os.pipe()
            with self._lock:
                try:
                    socket.send_fds(self._socket, [start.encode()], [*fds, theirs])
                    pid = self._receive(_FORK_LIMIT_S)
                finally:
                    os.close(theirs)
        return ForkedProcess(pid, exit_pipe)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(_FORK_LIMIT_S)

    def _receive(self, limit_s: float) -> int:
        self._socket.settimeout(limit_s)
        answer = self._socket.recv(NUMBER.size)
        assert answer, "the fork server has ended: its standard error says why"
        return int(NUMBER.unpack(answer)[0])


def fork_server(env: Mapping[str, str]) -> ForkServer | None:
    """Return the server for processes with these variables; None off Linux, or when there are too many servers."""
    found = next((server for server in _servers if server.fits(env)), None)
    if found is None and sys.platform == "linux" and len(_servers) < _MAX_SERVERS:
        found = ForkServer(env)
        _servers.append(found)
    return found


def popen_rank(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int,
    stdout: int,
    pass_fds: Sequence[int],
    start_new_session: bool,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Do what `subprocess.Popen` does for `RankProcesses`, with a forked process where that is possible."""
    forks = fork_server(env) if is_forkable(command, env) else None
    if forks is None:
        return subprocess.Popen(
            command, env=env, stdin=stdin, stdout=stdout, pass_fds=pass_fds, start_new_session=start_new_session
        )
    with Path(os.devnull).open("wb") as nothing:
        return forks.start(
            command[2],
            env,
            *command[3:],
            stdout=nothing.fileno() if stdout == subprocess.DEVNULL else stdout,
            pass_fds=pass_fds,
            new_session=start_new_session,
        )
