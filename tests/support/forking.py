"""The product's fork server for tests: `python -m tests.support.forking FD`.

It also has the imports of the command line and of ranks. It sees no GPU, and megatron-core runs in it as
`tests.support.megatron_cpu` says. A process that starts others itself (the launcher, a trainer with ranks) gets a fork
server of its own, see `fork_children`: its `subprocess.Popen` then forks what has been imported, and executes
everything else.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlboost.local import die_with_parent, fork_server, fork_server_process
from rlboost.local.fork_server_process import ForkRequest, import_modules, serve
from rlboost.shared.process.hidden_modules import modules_hidden
from tests.support import megatron_cpu

RANK = "rlboost.services.trainer.adapters.ranks.rank"
_FORKABLE = {RANK, "rlboost", fork_server.MODULE, *fork_server_process.SERVICES}
_STARTS_OTHERS = ("rlboost", "rlboost.services.trainer")
_MODULES = (
    *fork_server_process.MODULES,
    "rlboost.cli",
    "rlboost.local.foreground",
    "rlboost.services.trainer.adapters.fsdp.rank_engine",
)
_READY_LIMIT_S = 60.0
RUN_TIME_VARIABLES = (
    *fork_server.RUN_TIME_VARIABLES,
    *("AWS_", "HTTP_PROXY", "NO_PROXY", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME"),
)
"""Prefixes of variables on which no import depends here."""


def is_forkable(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if a command runs what may be forked."""
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in _FORKABLE:
        return False
    if command[2] == RANK and command[3] == "megatron":
        # The fork server has imported megatron-core as these processes would.
        return env.get("PYTHONPATH", "").startswith(megatron_cpu.python_path().partition(os.pathsep)[0])
    return env.get("RLBOOST_WORKER_ENGINE") != "vllm"  # vLLM looks at how its process was started


# --- a process that starts others -------------------------------------------------------------------------------------


class _OwnForkServer(fork_server.ForkServer):
    """Forked from this process before it did anything."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(os.environ, Path(os.devnull), run_time_variables=RUN_TIME_VARIABLES)
        self._socket = channel

    def start(self) -> None:
        """Do nothing: there is only the one that was forked."""


def fork_children() -> ForkRequest | None:
    """Let `subprocess.Popen` of this process fork what may be forked; return None.

    The calls return a second time, in the processes that are forked so: with what these are to run. There must be one
    thread only.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return serve(theirs) or sys.exit()
    theirs.close()
    ForkingPopen.forks = _OwnForkServer(ours)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    return None


class ForkingPopen(subprocess.Popen[Any]):
    """Forks a service, a rank, a fork server or the command line; executes everything else."""

    forks: fork_server.ForkServer

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # rest: executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
        # p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session, ...
        pass_fds, cwd, env, pipes = rest[3], rest[4], rest[5], rest[9:15]
        command, dies_with_caller = _without_guard(args)
        env = dict(os.environ) if env is None else env
        stdin, stdout, stderr = (fd if fd != -1 else number for number, fd in enumerate((pipes[0], pipes[3], pipes[5])))
        pid = None
        if is_forkable(command, env) and self.forks.is_ready(_READY_LIMIT_S):
            pid = self.forks.fork(
                command,
                env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                cwd=cwd,
                dies_with_caller=dies_with_caller,
            )
        if pid is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _without_guard(args: Any) -> tuple[list[str], bool]:
    """Return a command without `die_with_parent`, and whether it had it."""
    command = [str(arg) for arg in args] if isinstance(args, (list, tuple)) else []
    is_guarded = command[3:4] == [die_with_parent.__file__]
    return (command[5:] if is_guarded else command), is_guarded


# --- the command ------------------------------------------------------------------------------------------------------


def _use_python_path(request: ForkRequest) -> None:
    """Do what the interpreter would have done at its start with PYTHONPATH."""
    folders = [folder for folder in request.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = list(dict.fromkeys([request.cwd, *folders, *sys.path[1:]]))
    for folder in folders:
        if (customization := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(customization))


def main() -> None:
    """Serve; in each new process run its module."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    if importlib.util.find_spec("megatron") is not None:
        with warnings.catch_warnings(), modules_hidden("tensorboard", "wandb"):  # as a rank imports it
            warnings.simplefilter("ignore")
            import_modules(["rlboost.services.trainer.adapters.megatron.rank_engine"])
    import_modules(_MODULES)
    request = serve(channel)
    while request is not None and request.module in _STARTS_OTHERS:
        _use_python_path(request)
        child = fork_children()
        if child is None:
            break
        request = child
    if request is None:
        return
    _use_python_path(request)
    own = request.module == fork_server.MODULE  # the launcher's, which is to do the same as this one
    runpy.run_module("tests.support.forking" if own else request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
