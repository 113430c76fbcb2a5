"""Starts the rank processes on the trainer's own machine, with a socket pair to each."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.ranks.layout import Layout
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.tls import CA_VARIABLE

_EXIT_LIMIT_S = 2.0
"""How long a process may take to exit by itself after its socket has closed."""


class LocalRanks:
    """`Launcher` on this machine."""

    def __init__(self, layout: Layout, device: str) -> None:
        """Start no process yet; with device `cpu` the processes see no GPU."""
        self.layout = layout
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """See `Launcher.pids`."""
        return [process.pid for process in self._processes]

    @property
    def init_method(self) -> str:
        """See `Launcher.init_method`."""
        assert self._rendezvous is not None, "start first"
        return f"file://{Path(self._rendezvous.name) / 'rendezvous'}"

    def local_rank(self, rank: int) -> int:
        """See `Launcher.local_rank`."""
        return rank

    def start(self, kind: str) -> list[socket.socket]:
        """See `Launcher.start`."""
        channels: list[socket.socket] = []
        # All ranks are on this machine, which may have no name server.
        environment = rank_environment(self._device, interface="lo")
        # Kept until `close`: NCCL creates communicators at their first use, through the same file.
        self._rendezvous = tempfile.TemporaryDirectory(prefix="rlboost-ranks-")
        for _ in range(self.layout.n_ranks):
            ours, theirs = socket.socketpair()
            channels.append(ours)
            command = [
                sys.executable,
                "-m",
                "rlboost.services.trainer.adapters.ranks.rank",
                kind,
                str(theirs.fileno()),
            ]
            with theirs:
                # Its own session: a keyboard interrupt is for the trainer.
                process = subprocess.Popen(  # noqa: S603 - our own module
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_file_descriptor(sys.stderr) else subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            self._processes.append(process)
        return channels

    def kill(self) -> None:
        """See `Launcher.kill`."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        """See `Launcher.close`."""
        self.kill()
        for process in self._processes:
            process.wait()
        if self._rendezvous is not None:
            self._rendezvous.cleanup()

    def describe_end(self, rank: int) -> str:
        """See `Launcher.describe_end`."""
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_LIMIT_S)
        return f"ended with code {process.returncode}"


def rank_environment(device: str, interface: str) -> dict[str, str]:
    """Return the environment of a rank, without secrets; gloo uses a network interface, the device `cpu` no GPU."""
    environment = environment_without_settings(CA_VARIABLE)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        return environment | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": interface}
    # Tensor and sequence parallelism rely on kernels starting in the order in which they were launched.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return environment


def _has_file_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True
