"""A process that has the imports of services, ranks and the command line: `python -m tests.support.forking FD`.

It sees no GPU, and megatron-core runs in it as `tests.support.megatron_cpu` says. A process that starts others itself
(the launcher, a trainer with ranks) gets a server of its own, see `fork_children`: its `subprocess.Popen` then forks
what has been imported, and executes everything else.
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

from rlboost.local import die_with_parent
from rlboost.shared.process.modules import modules_hidden
from tests.support import megatron_cpu
from tests.support.fork_channel import ForkClient, ForkRequest, import_modules, serve

RANK = "rlboost.services.trainer.adapters.torch.rank"
_SERVICES = tuple(
    f"rlboost.services.{name}" for name in ("rollout_manager", "rollout_worker", "trainer", "weight_store")
)
_FORKABLE = {RANK, "rlboost", *_SERVICES}
_STARTS_OTHERS = ("rlboost", "rlboost.services.trainer")
_MODULES = (
    *(f"{name}.__main__" for name in _SERVICES),
    # What they import after their start.
    "rlboost.services.rollout_worker.adapters.torch.engine",
    "rlboost.services.rollout_worker.api",
    "rlboost.services.trainer.build",
    "rlboost.shared.weights.peers.blob_routes",
    "uvicorn.protocols.http.httptools_impl",
    "rlboost.cli",
    "rlboost.local.detached",
    "rlboost.local.detached",
    "rlboost.services.trainer.adapters.torch.fsdp",
)
_READY_LIMIT_S = 60.0


def is_forkable(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if a command runs what may be forked."""
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in _FORKABLE:
        return False
    if command[2] == RANK and command[3] == "megatron":
        # The fork server has imported megatron-core as these processes would.
        return env.get("PYTHONPATH", "").startswith(megatron_cpu.python_path().partition(os.pathsep)[0])
    return env.get("RLBOOST_WORKER_ENGINE") != "vllm"  # vLLM looks at how its process was started


# --- a process that starts others -------------------------------------------------------------------------------------


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
    ForkingPopen.forks = ForkClient(ours, os.environ)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    return None


class ForkingPopen(subprocess.Popen[Any]):
    """Forks a service, a rank or the command line; executes everything else."""

    forks: ForkClient

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


def _open_streams() -> None:
    """Open standard output and error for their new descriptors, which may be pipes where the old ones were files."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        setattr(sys, name, os.fdopen(fd, "w", encoding="utf-8", buffering=1, closefd=False))


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
    _open_streams()
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
