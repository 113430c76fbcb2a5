"""Forks processes from one that has done their imports, which would take each of them seconds of processor time.

`python -m tests.support.forking FD MODULE...` is a fork server: it imports the modules and serves the socket FD.
Consumes: one `Start` a message, with the descriptors of the new process. Produces: a process that then does what
`python -m MODULE` would do; its id on the socket; its exit code in the last descriptor.
Ends when: the socket is closed. It sees no GPU, and megatron-core runs in it as `tests.support.megatron_cpu` says.

A process that starts others itself (the launcher, a trainer with ranks) gets a fork server of its own, see
`fork_children`: its `subprocess.Popen` then forks what the fork server has imported, and executes everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
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
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlboost.local import die_with_parent
from rlboost.shared.importing import modules_hidden
from tests.support import megatron_cpu

RANK = "rlboost.services.trainer.adapters.ranks.rank"
SERVICES = ("rollout_manager", "rollout_worker", "trainer", "weight_store")
FORKABLE = {RANK, "rlboost", *(f"rlboost.services.{name}" for name in SERVICES)}
"""What may be forked."""
STARTS_OTHERS = ("rlboost", "rlboost.services.trainer")
NUMBER = struct.Struct("!q")

_READ_AT_RUN_TIME = (
    "RLBOOST_", "AWS_", "HTTP_PROXY", "NO_PROXY", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
"""Prefixes of variables on which no import depends."""
_MAX_REQUEST_BYTES = 1 << 17
_MAX_FDS = 16
_FIRST_HIGH_FD = 512
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Start:
    """A process to start."""

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    fds: Sequence[int]
    """The number that each descriptor of the message has in the process."""
    new_session: bool = False
    dies_with: int = 0
    """Process id of the parent with which it dies; 0: with none."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({**asdict(self), "env": dict(self.env)}).encode()


def import_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on which imports may depend."""
    return {name: value for name, value in env.items() if not name.startswith(_READ_AT_RUN_TIME)}


# --- the fork server --------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> Start | None:
    """Fork until the client is gone and return None; in the new processes return what to run."""
    channel.send(NUMBER.pack(os.getpid()))
    with channel, selectors.DefaultSelector() as selector:
        found = _fork(channel, selector)
    if found is not None:
        _become(*found)
        return found[0]
    return None


def _fork(channel: socket.socket, selector: selectors.BaseSelector) -> tuple[Start, list[int]] | None:
    exit_pipes: dict[int, tuple[int, int]] = {}
    selector.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                selector.unregister(key.fd)
                _report_exit(key.fd, *exit_pipes.pop(key.fd))
                continue
            request = _receive(channel)
            if request is None:
                return None
            pid = os.fork()
            if pid == 0:
                start, (*fds, _) = request
                return start, fds
            *fds, exit_pipe = request[1]
            _close(fds)
            process = os.pidfd_open(pid)
            exit_pipes[process] = (pid, exit_pipe)
            selector.register(process, selectors.EVENT_READ)
            channel.send(NUMBER.pack(pid))


def _receive(channel: socket.socket) -> tuple[Start, list[int]] | None:
    text, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, _MAX_FDS)
    return (Start(**json.loads(text)), fds) if text else None


def _report_exit(process: int, pid: int, exit_pipe: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the client does not ask for it
        os.write(exit_pipe, NUMBER.pack(code))
    _close((process, exit_pipe))


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _become(start: Start, fds: Sequence[int]) -> None:
    """Give this process the descriptors, variables and arguments that it would have been started with."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD) for fd in fds]
    os.closerange(3, _FIRST_HIGH_FD)
    for fd, number in zip(moved, start.fds, strict=True):
        os.dup2(fd, number)
    _close(moved)
    if start.new_session:
        os.setsid()
    if start.dies_with:
        _prctl(die_with_parent.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != start.dies_with:
            os._exit(1)
    _prctl(_PR_SET_NAME, start.module.rpartition(".")[2].encode())
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    path = [start.cwd, *filter(None, start.env.get("PYTHONPATH", "").split(":"))]
    sys.path[:] = list(dict.fromkeys(path + sys.path[1:]))
    for folder in path[1:]:  # what the interpreter would have run at its start
        if (customization := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(customization))
    sys.argv[1:] = start.arguments


def _prctl(option: int, value: int | bytes) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


# --- a process that starts others -------------------------------------------------------------------------------------


def fork_children() -> Start | None:
    """Let `subprocess.Popen` of this process fork what may be forked; return None.

    The calls return a second time, in the processes that are forked so: with what these are to run. There must be one
    thread only.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The fork server's children end after they have forked: their children become children of this process.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.fork() == 0:
        ours.close()
        with theirs:
            start, fds = _fork_for_parent(theirs)
        _become(start, fds)
        return start
    theirs.close()
    _Popen.channel, _Popen.import_environment = ours, import_environment(os.environ)
    subprocess.Popen = _Popen  # type: ignore[misc]
    return None


def _fork_for_parent(channel: socket.socket) -> tuple[Start, list[int]]:
    """Fork until the client is gone, then exit; in the new processes return what to run."""
    while True:
        request = _receive(channel)
        if request is None:
            sys.exit()
        adopted, say_adopted = os.pipe()
        pid_answer, say_pid = os.pipe()
        middle = os.fork()
        if middle == 0:
            if pid := os.fork():
                os.write(say_pid, NUMBER.pack(pid))
                os._exit(0)
            os.read(adopted, 1)
            return request
        os.waitpid(middle, 0)
        os.write(say_adopted, b"1")
        channel.send(os.read(pid_answer, NUMBER.size))
        _close((*request[1], adopted, say_adopted, pid_answer, say_pid))


class _Popen(subprocess.Popen[Any]):
    """Forks a service, a rank or the command line; executes everything else."""

    channel: socket.socket
    import_environment: Mapping[str, str]
    lock = threading.Lock()

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # rest: executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
        # p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session, ...
        pass_fds, cwd, env, pipes, new_session = rest[3], rest[4], rest[5], rest[9:15], rest[20]
        command, dies_with = _without_guard(args)
        env = dict(os.environ) if env is None else env
        if not is_forkable(command, env) or import_environment(env) != self.import_environment:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        standard = [fd if fd != -1 else number for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        start = Start(
            module=command[2],
            arguments=command[3:],
            env=env,
            cwd=str(cwd or Path.cwd()),
            fds=[0, 1, 2, *pass_fds],
            new_session=new_session,
            dies_with=dies_with,
        )
        with self.lock:
            socket.send_fds(self.channel, [start.encode()], [*standard, *pass_fds])
            (self.pid,) = NUMBER.unpack(self.channel.recv(NUMBER.size))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _without_guard(args: Any) -> tuple[list[str], int]:
    """Return a command without `die_with_parent`, and the process with which it dies, 0 for none."""
    command = [str(arg) for arg in args] if isinstance(args, (list, tuple)) else []
    if command[3:4] == [die_with_parent.__file__]:
        return command[5:], int(command[4])
    return command, 0


def is_forkable(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if a command runs what may be forked."""
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in FORKABLE:
        return False
    if command[2] == RANK and command[-1] == "megatron":
        # The fork server has imported megatron-core as these processes would.
        return env.get("PYTHONPATH", "").startswith(megatron_cpu.python_path().partition(os.pathsep)[0])
    return env.get("RLBOOST_WORKER_ENGINE") != "vllm"  # vLLM looks at how its process was started


# --- the command ------------------------------------------------------------------------------------------------------


def _import(modules: Sequence[str]) -> None:
    if importlib.util.find_spec("megatron") is not None:
        with warnings.catch_warnings(), modules_hidden("tensorboard", "wandb"):  # as a rank imports it
            warnings.simplefilter("ignore")
            importlib.import_module("rlboost.services.trainer.adapters.megatron.rank_engine")
    for name in modules:
        importlib.import_module(name)
        if name.endswith(".__main__"):
            del sys.modules[name]  # it is to run
    gc.collect()
    gc.freeze()


def _main() -> None:
    fd, modules = int(sys.argv[1]), sys.argv[2:]
    del sys.argv[1:]
    _import(modules)
    start = serve(socket.socket(fileno=fd))
    while start is not None and start.module in STARTS_OTHERS:
        child = fork_children()
        if child is None:
            break
        start = child
    if start is not None:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
