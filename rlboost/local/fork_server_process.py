"""Fork processes that have imported the services: `python -m rlboost.local.fork_server_process FD`.

Consumes one `ForkRequest` per message on the socket FD, with the descriptors of the new process. Answers the process's
id, or minus an error number. Ends when the socket is closed.

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
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlboost.local import die_with_parent
from rlboost.shared.process.garbage_collection import gc_paused

SERVICES = tuple(
    f"rlboost.services.{name}" for name in ("rollout_manager", "rollout_worker", "trainer", "weight_store")
)
MODULES = (
    *(f"{name}.__main__" for name in SERVICES),
    # What they import after their start.
    "rlboost.services.rollout_worker.adapters.torch.engine",
    "rlboost.services.rollout_worker.api",
    "rlboost.services.trainer.build",
    "rlboost.shared.weights.peers.blob_routes",
    "uvicorn.protocols.http.httptools_impl",
)
"""Nothing of the user: edits of reward functions count at the next start of a process."""
NUMBER = struct.Struct("!q")
MAX_FDS = 16
MAX_REQUEST_BYTES = 1 << 17
_FIRST_HIGH_FD = 512


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
    channel.send(NUMBER.pack(os.getpid()))
    while True:
        text, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_FDS)
        if not text:
            return None
        try:
            pid = _fork_for_client()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            return ForkRequest(**json.loads(text)), fds
        _close(fds)
        channel.send(NUMBER.pack(pid))


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
        os.write(write, NUMBER.pack(pid))
        os._exit(0)
    os.waitpid(middle, 0)  # its end makes the new process the client's
    pid = int(NUMBER.unpack(os.read(read, NUMBER.size))[0])
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
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD) for fd in fds]
    _close(fds)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    _close(high)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> int:
    """Serve; in each new process run its module."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        import_modules(MODULES)
    except Unforkable as error:
        print(f"services are executed, not forked: {error}", file=sys.stderr)
        return 1
    request = serve(channel)
    if request is not None:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
