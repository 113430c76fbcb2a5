"""The client of a fork server: starts services in milliseconds, without the seconds that their imports take.

Not `multiprocessing.forkserver`: its processes are children of its server, so they would die with it, and their exit
codes, CPU time and output are not the launcher's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlboost.local import die_with_parent
from rlboost.local.cpu_time import session_cpu_s
from rlboost.local.fork_server_process import MAX_REQUEST_BYTES, NUMBER, SERVICES, ForkRequest

FORK_SERVER = "fork-server"
"""Its name in logs and measurements."""
MODULE = "rlboost.local.fork_server_process"
_PR_SET_CHILD_SUBREAPER = 36
_FORK_LIMIT_S = 10.0
_POLL_INTERVAL_S = 0.02

RUN_TIME_VARIABLES = ("RLBOOST_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of variables that no import reads; CUDA reads its variable when it is initialized, after the fork."""


def is_forkable(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if a fork server can run the command. vLLM starts processes of its own, so its worker cannot fork."""
    is_service = list(command[:2]) == [sys.executable, "-m"] and command[2] in SERVICES
    return is_service and env.get("RLBOOST_WORKER_ENGINE") != "vllm" and sys.platform == "linux"


class ForkServer:
    """A process that has the services' imports, and forks itself on request.

    What it forks is a child of the caller like any that `subprocess.Popen` starts, and outlives it. If it dies, it is
    started again; if it refuses to serve, because its imports left a thread or a GPU open, it is not started again.

    Args:
        env: the variables of the processes to fork; what imports may read of them must be the same for all.
        log: receives its output.
        run_time_variables: prefixes of variables that may differ.

    """

    def __init__(
        self,
        env: Mapping[str, str],
        log: Path,
        *,
        run_time_variables: tuple[str, ...] = RUN_TIME_VARIABLES,
    ) -> None:
        """Describe the server; `start` forks it."""
        self._run_time_variables = run_time_variables
        self._env = self._import_variables(env)
        self._log = log
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._past_cpu_s = 0.0

    @property
    def pid(self) -> int:
        """Its process id, 0 while it does not run."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the process, which takes seconds to be ready."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._launch(theirs.fileno())

    def _launch(self, channel: int) -> subprocess.Popen[bytes]:
        self._log.touch(mode=0o600)
        with self._log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - our own program
                die_with_parent.guarded(sys.executable, "-m", MODULE, str(channel)),
                env=self._env,
                pass_fds=[channel],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def until_ready(self, limit_s: float) -> None:
        """Return when it is ready or has ended, at the latest after the limit."""
        limit = time.monotonic() + limit_s
        while not self.is_ready() and self._socket is not None and time.monotonic() < limit:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(_POLL_INTERVAL_S)

    def is_ready(self, patience_s: float = 0.0) -> bool:
        """Return True if it has imported everything; block for this long until it has."""
        if self._is_ready or self._socket is None:
            return self._is_ready
        self._socket.settimeout(patience_s)
        try:
            self._is_ready = bool(self._socket.recv(NUMBER.size))
        except (BlockingIOError, TimeoutError):
            return False
        except ConnectionResetError:
            pass
        if not self._is_ready:
            is_killed = self._process is not None and self._process.wait(_FORK_LIMIT_S) < 0
            # If it refused to serve, another one would, too.
            (self._restart if is_killed else self.close)()
        return self._is_ready

    def cpu_s(self) -> float:
        """Return its CPU seconds over all restarts, without those of what it has forked."""
        return self._past_cpu_s + (session_cpu_s(self._process.pid) if self._process else 0.0)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return True if a process with these variables would have imported the same."""
        return self._import_variables(env) == self._env

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
        dies_with_caller: bool = True,
    ) -> int | None:
        """Start a process that leads its own session; return its id, None if the caller must execute the command.

        Args:
            command: `[sys.executable, "-m", MODULE, ARGUMENT ...]`.
            env: all its variables.
            stdin: descriptor; so are `stdout` and `stderr`.
            stdout: see `stdin`.
            stderr: see `stdin`.
            pass_fds: descriptors that it has under the same numbers.
            cwd: the process's working folder; this process's if None.
            dies_with_caller: the kernel kills it when this process ends.

        """
        if not self.fits(env):
            return None
        fds = [stdin, stdout, stderr, *pass_fds]
        request = ForkRequest(
            command=command,
            env=env,
            cwd=str(cwd or Path.cwd()),
            fds=[0, 1, 2, *pass_fds],
            client=os.getpid(),
            dies_with_client=dies_with_caller,
        ).encode()
        with self._lock:
            if not self.is_ready() or len(request) > MAX_REQUEST_BYTES:
                return None
            try:
                return self._fork(request, fds)
            except OSError:
                self._restart()
                return None

    def _fork(self, request: bytes, fds: Sequence[int]) -> int | None:
        assert self._socket is not None
        go_ahead, say_go = os.pipe()
        try:
            # Only now: orphans of other processes are not for us to reap.
            die_with_parent.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._socket.settimeout(_FORK_LIMIT_S)
            socket.send_fds(self._socket, [request], [*fds, go_ahead])
            answer = self._socket.recv(NUMBER.size)
            if not answer:
                raise ConnectionResetError("the fork server has ended")
            pid = int(NUMBER.unpack(answer)[0])
            if pid < 0:
                return None
            os.write(say_go, b"1")
        finally:
            die_with_parent.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(go_ahead)
            os.close(say_go)
        return pid

    def _restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        """Kill it; what it has forked lives on."""
        self._is_ready = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._past_cpu_s = self.cpu_s()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _import_variables(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if not name.startswith(self._run_time_variables)}
