"""Forks processes that have their imports: the server that forks itself, and the client that asks it to.

The client sends one `ForkRequest` per message on a socket, with the descriptors of the new process. The server answers
the process's id, or minus an error number, and ends when the socket is closed.

The new process is a child of the client, which must be a child subreaper while it waits for the answer. It leads its
own session, and runs only after the client has written to the last descriptor: a client that has given up on the answer
executes the command itself.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlboost.local import die_with_parent
from rlboost.shared.process.system import gc_paused

RUN_TIME_VARIABLES = (
    *("RLBOOST_", "CUDA_VISIBLE_DEVICES", "AWS_", "HTTP_PROXY", "NO_PROXY", "PYTEST_", "PYTHONPATH"),
    *("PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME"),
)
"""Prefixes of variables on which no import depends here."""
_NUMBER = struct.Struct("!q")
_MAX_FDS = 16
_MAX_REQUEST_BYTES = 1 << 17
_FORK_LIMIT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Unforkable(RuntimeError):
    """The imports have left a state that a fork would break."""


@dataclass(frozen=True)
class ForkRequest:
    """A process to start: `COMMAND` is `[interpreter, "-m", MODULE, ARGUMENT ...]`."""

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    fds: Sequence[int]
    """The number that each descriptor of the message has in the process."""
    client: int
    """Process id of the client, the parent of the new process."""
    dies_with_client: bool = True

    @property
    def module(self) -> str:
        """The module to run."""
        return self.command[2]

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({**asdict(self), "env": dict(self.env)}).encode()


class ForkClient:
    """Lets a server fork processes. They are children of the caller, and outlive the server.

    Args:
        channel: the socket to the server.
        env: the variables with which the server has imported.

    """

    def __init__(self, channel: socket.socket, env: Mapping[str, str]) -> None:
        """Use a server that is starting."""
        self._channel = channel
        self._env = _import_variables(env)
        self._lock = threading.Lock()
        self._is_ready = self._has_ended = False

    def is_ready(self, patience_s: float = 0.0) -> bool:
        """Return True if it has imported everything; block for this long until it has."""
        if self._is_ready or self._has_ended:
            return self._is_ready
        self._channel.settimeout(patience_s)
        try:
            self._is_ready = bool(self._channel.recv(_NUMBER.size))
        except (BlockingIOError, TimeoutError):
            return False
        except ConnectionResetError:
            pass
        self._has_ended = not self._is_ready
        return self._is_ready

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return True if a process with these variables would have imported the same."""
        return _import_variables(env) == self._env

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
        request = ForkRequest(
            command=command,
            env=env,
            cwd=str(cwd or Path.cwd()),
            fds=[0, 1, 2, *pass_fds],
            client=os.getpid(),
            dies_with_client=dies_with_caller,
        ).encode()
        with self._lock:
            if not self.fits(env) or not self.is_ready() or len(request) > _MAX_REQUEST_BYTES:
                return None
            return self._fork(request, [stdin, stdout, stderr, *pass_fds])

    def _fork(self, request: bytes, fds: Sequence[int]) -> int | None:
        go_ahead, say_go = os.pipe()
        try:
            # Only now: orphans of other processes are not for us to reap.
            die_with_parent.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._channel.settimeout(_FORK_LIMIT_S)
            socket.send_fds(self._channel, [request], [*fds, go_ahead])
            answer = self._channel.recv(_NUMBER.size)
            pid = int(_NUMBER.unpack(answer)[0]) if answer else -1
            if pid < 0:
                return None
            os.write(say_go, b"1")
        except OSError:
            self._is_ready, self._has_ended = False, True  # its next answer would be that to this request
            return None
        finally:
            die_with_parent.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(go_ahead)
            os.close(say_go)
        return pid


def _import_variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(RUN_TIME_VARIABLES)}


# --- the server -------------------------------------------------------------------------------------------------------


def import_modules(modules: Iterable[str]) -> None:
    """Import what the forked processes need.

    Raises:
        Unforkable: an import started a thread, opened a descriptor (a GPU's, for example) or initialized CUDA.

    """
    before = _descriptors()
    # First, as it finds the command line only where the environment is as it was at the start.
    importlib.import_module("setproctitle").getproctitle()
    with gc_paused():
        for name in modules:
            importlib.import_module(name)
            if name.endswith(".__main__"):
                del sys.modules[name]  # it is yet to run
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise Unforkable("importing the services started a thread")
    if _descriptors() != before:
        raise Unforkable("importing the services opened a descriptor")
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise Unforkable("importing the services initialized CUDA")
    gc.collect()
    gc.freeze()  # the collector does not touch, and so copy, the pages that all processes share


def _descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def serve(channel: socket.socket) -> ForkRequest | None:
    """Fork until the client is gone and return None; in each new process return what it is to run."""
    with channel:
        try:
            found = _fork_until_closed(channel)
        except (BrokenPipeError, ConnectionResetError):
            return None
    if found is None:
        return None
    _become(*found)
    return found[0]


def _fork_until_closed(channel: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    channel.send(_NUMBER.pack(os.getpid()))
    while True:
        text, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, _MAX_FDS)
        if not text:
            return None
        try:
            pid = _fork_for_client()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            return ForkRequest(**json.loads(text)), fds
        _close(fds)
        channel.send(_NUMBER.pack(pid))


def _fork_for_client() -> int:
    """Return the id of a new process, which is the client's child and not this one's; 0 in the new process."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            _close((read, write))
            return 0
        os.write(write, _NUMBER.pack(pid))
        os._exit(0)
    os.waitpid(middle, 0)  # its end makes the new process the client's
    pid = int(_NUMBER.unpack(os.read(read, _NUMBER.size))[0])
    _close((read, write))
    return pid


def _become(request: ForkRequest, fds: list[int]) -> None:
    """Give this process what it would have been started with, once the client says so."""
    go_ahead = fds.pop()
    if not os.read(go_ahead, 1):
        os._exit(1)  # the client has given up or died
    os.close(go_ahead)
    _move(fds, request.fds)
    os.setsid()
    if request.dies_with_client:
        die_with_parent.prctl(die_with_parent.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request.client:  # it died first
            os._exit(1)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    sys.argv[1:] = request.command[3:]
    sys.orig_argv[:] = request.command
    titles = sys.modules["setproctitle"]
    titles.setproctitle(" ".join(request.command))
    titles.setthreadtitle(Path(request.command[0]).name)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as Python does for `random`
    importlib.invalidate_caches()  # the user's folder may have new files


def _move(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, which may be in use by others of them."""
    first = max(numbers) + 1  # not by a fixed number: the limit of open files may be low
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first) for fd in fds]
    _close(fds)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    _close(high)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
