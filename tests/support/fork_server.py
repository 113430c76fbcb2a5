"""Processes forked from one that has imported a service already: importing takes seconds of processor time each time.

`python -m tests.support.fork_server FD MODULE...` imports the modules and says so on the socket FD. Consumes: what to
run, with its log and a pipe. Produces: for each a process of its own, which then does what `python -m` would; its id on
the socket, its exit code in the pipe. Ends when the socket is closed.

Python starts anew, with its imports and another seed of its hashes, in `tests/e2e`, and for what has a module or
settings of its own here.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_MODULES = {
    "rollout_manager": ("uvicorn.protocols.http.httptools_impl",),
    "rollout_worker": (
        "services.rollout_worker.adapters.torch_engine",
        "services.rollout_worker.api",
        "shared.weights.peers.serving",
        "uvicorn.protocols.http.httptools_impl",
    ),
    "trainer": ("services.trainer.workshop", "uvicorn.protocols.http.httptools_impl"),
    "weight_store": ("uvicorn.protocols.http.httptools_impl",),
}
"""What a service imports only while it runs, if at all."""
_READ_LATE = ("RLBOOST_", "AWS_", "HTTP_PROXY", "NO_PROXY", "PYTEST_CURRENT_TEST")
"""How variables begin that nothing reads while it is imported."""
_START_LIMIT_S = 180.0
_FORK_LIMIT_S = 60.0
_MOST = 3
"""Servers of a service, whose imports may hang on other variables."""
_NUMBER = struct.Struct("!q")
_REQUEST_BYTES = 1 << 17


_servers: dict[str, list[ForkServer]] = {}


class Forked:
    """A process that was forked, as `subprocess.Popen` shows one."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self._ended = ended
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end; return the exit code."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _read(self, limit_s: float) -> int | None:
        if self._code is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ended, selectors.EVENT_READ)
                if not selector.select(limit_s):
                    return None
            said = os.read(self._ended, _NUMBER.size)
            os.close(self._ended)
            assert said, f"the fork server is gone, and with it what became of process {self.pid}"
            (self._code,) = _NUMBER.unpack(said)
        return self._code


class ForkServer:
    """Forks processes of one service. Ready when it is there."""

    def __init__(self, service: str, env: Mapping[str, str]) -> None:
        """Start the server with these variables, and wait until it has imported everything."""
        self._service = service
        self._env = _fixed(env)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            modules = (f"services.{service}.__main__", *_MODULES[service])
            command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules]
            nothing = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing, env=self._env
            )
        atexit.register(self._close)
        self._number(_START_LIMIT_S)

    def fits(self, env: Mapping[str, str]) -> bool:
        """Tell whether a process with these variables would have imported the same."""
        return _fixed(env) == self._env

    def run(self, module: str, env: Mapping[str, str], log: IO[bytes]) -> Forked:
        """Return a process that runs a module, with its standard error in a log."""
        request = json.dumps({"module": module, "env": dict(env), "cwd": str(Path.cwd())}).encode()
        ended, say = os.pipe()
        with self._lock:
            try:
                socket.send_fds(self._socket, [request], [log.fileno(), say])
                pid = self._number(_FORK_LIMIT_S)
            finally:
                os.close(say)
        return Forked(pid, ended)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(_FORK_LIMIT_S)

    def _number(self, limit_s: float) -> int:
        self._socket.settimeout(limit_s)
        said = self._socket.recv(_NUMBER.size)
        assert said, f"the fork server of {self._service} has ended: its standard error says why"
        return int(_NUMBER.unpack(said)[0])


def fork_server(service: str, env: Mapping[str, str]) -> ForkServer | None:
    """Return a server of a service, started when it is first asked for; None off Linux, or where it has many."""
    known = _servers.setdefault(service, [])
    found = next((server for server in known if server.fits(env)), None)
    if found is None and sys.platform == "linux" and len(known) < _MOST:
        found = ForkServer(service, env)
        known.append(found)
    return found


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_READ_LATE)}


def _serve(channel: socket.socket) -> str | None:
    """Fork until the client is gone and return None; in the processes themselves return what to run."""
    channel.send(_NUMBER.pack(os.getpid()))
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    selector.unregister(key.fd)
                    _tell(key.fd, *running.pop(key.fd))
                    continue
                text, fds, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 2)
                if not text:
                    return None
                log, say = fds
                pid = os.fork()
                if pid == 0:
                    os.dup2(log, sys.stderr.fileno())
                    for fd in (*fds, *running, *(say for _, say in running.values())):
                        os.close(fd)
                    channel.close()
                    return _become(**json.loads(text))
                os.close(log)
                end = os.pidfd_open(pid)
                running[end] = (pid, say)
                selector.register(end, selectors.EVENT_READ)
                channel.send(_NUMBER.pack(pid))


def _tell(end: int, pid: int, say: int) -> None:
    os.write(say, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os.close(say)
    os.close(end)


def _become(module: str, env: Mapping[str, str], cwd: str) -> str:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    del sys.argv[1:]
    return module


def _import(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
        if name.endswith(".__main__"):
            del sys.modules[name]  # it is to run
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import(sys.argv[2:])
    if to_run := _serve(socket.socket(fileno=int(sys.argv[1]))):
        runpy.run_module(to_run, run_name="__main__", alter_sys=True)
