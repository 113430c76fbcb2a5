"""Starts the rank processes, one per rank, and sends each call to all of them over a socket pair.

The trainer is not a rank. It stays one asyncio process, so it survives and reports a rank that is killed, runs out of
memory or hangs in a collective.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.ranks import wire
from rlboost.shared.errors import Retryable, Timeout

CALL_LIMIT_S = 3600.0
"""Limit of one call; a rank that takes longer hangs."""
_GRACE_S = 20.0
"""How long the other ranks may take to finish or fail after the first failure."""
_EXIT_LIMIT_S = 2.0
"""How long a process may take to exit by itself after its socket has closed."""

AnswerFn = Callable[[dict[str, Any]], dict[str, Any]]


class RankProcesses:
    """The rank processes, started at the first call. If one ends, all are killed."""

    def __init__(self, kind: str, n: int, device: str, init_arguments: Callable[[int, str], dict[str, Any]]) -> None:
        """Prepare.

        Args:
            kind: `megatron` or `fsdp`.
            n: number of ranks.
            device: `cpu` hides all GPUs from the processes.
            init_arguments: (rank, path of the rendezvous file) -> arguments of `RankEngine`.

        """
        self._kind = kind
        self._n = n
        self._device = device
        self._init_arguments = init_arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._lock = threading.RLock()
        self._closed = False
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, rank 0 first; empty before the first call."""
        return [process.pid for process in self._processes]

    def call(
        self, name: str, arguments: dict[str, Any] | Sequence[dict[str, Any]], answer: AnswerFn | None = None
    ) -> list[Any]:
        """Make one call on every rank and wait for all results, rank 0 first.

        Args:
            name: of a method of `RankEngine`.
            arguments: the same for all ranks, or one mapping per rank.
            answer: answers the questions that ranks ask during the call.

        Raises:
            Retryable: a rank's process has ended; all are killed.
            RuntimeError: a rank raised an unexpected error.
            RLBoostError: a rank raised it.

        """
        with self._lock:
            if not self._processes and not self._closed:
                try:
                    self._start()
                except BaseException:
                    self.close()
                    raise
            each = [arguments] * self._n if isinstance(arguments, dict) else arguments
            return self._exchange(name, [{"call": name, "arguments": one} for one in each], answer)

    def close(self) -> None:
        """Kill all processes at once; a call in progress fails."""
        self._closed = True
        self._kill()
        with self._lock:  # free once the call in progress has failed
            self._kill()
            for process, channel in zip(self._processes, self._channels, strict=True):
                process.wait()
                channel.close()
            if self._rendezvous is not None:
                self._rendezvous.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self._device == "cpu":
            # All ranks are on this machine, which may have no name server.
            environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        else:
            # Tensor and sequence parallelism rely on kernels starting in the order in which they were launched.
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        for _ in range(self._n):
            ours, theirs = socket.socketpair()
            command = [
                sys.executable,
                "-m",
                "rlboost.services.trainer.adapters.ranks.rank",
                str(theirs.fileno()),
                self._kind,
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
            ours.settimeout(CALL_LIMIT_S)
            self._processes.append(process)
            self._channels.append(ours)
        # Kept until `close`: NCCL creates communicators at their first use, through the same file.
        self._rendezvous = tempfile.TemporaryDirectory(prefix="rlboost-ranks-")
        file = str(Path(self._rendezvous.name) / "rendezvous")
        first = [{"call": "", "arguments": self._init_arguments(rank, file)} for rank in range(self._n)]
        self._exchange("start", first, None)

    def _exchange(self, name: str, requests: Sequence[dict[str, Any]], answer: AnswerFn | None) -> list[Any]:
        if self._closed:
            raise Retryable("the trainer's ranks have ended")
        results: dict[int, dict[str, Any]] = {}
        try:
            for rank, request in enumerate(requests):
                self._send(rank, name, request)
            self._collect(name, results, answer)
        except BaseException:
            self.close()
            raise
        failed = {rank: body for rank, body in results.items() if "error" in body}
        if failed:
            if len(results) < self._n:
                # The others are in a collective that will not complete.
                self.close()
            rank = min(failed)
            raise wire.decode_error(rank, failed[rank])
        return [results[rank]["result"] for rank in range(self._n)]

    def _collect(self, name: str, results: dict[int, dict[str, Any]], answer: AnswerFn | None) -> None:
        """Receive messages until each rank has answered, or one has failed and `_GRACE_S` is over."""
        limit = time.monotonic() + CALL_LIMIT_S
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(results) < self._n:
                ready = selector.select(max(0.0, limit - time.monotonic()))
                if not ready:
                    if any("error" in body for body in results.values()):
                        return
                    missing = sorted(set(range(self._n)) - set(results))
                    raise Timeout(f"ranks {missing} of the trainer did not answer '{name}' within {CALL_LIMIT_S:g} s")
                for key, _ in ready:
                    body = self._receive(key.data, name)
                    if "ask" in body:
                        assert answer is not None
                        self._send(key.data, name, answer(body))
                        continue
                    results[key.data] = body
                    if "error" in body:
                        limit = min(limit, time.monotonic() + _GRACE_S)

    def _send(self, rank: int, name: str, body: dict[str, Any]) -> None:
        try:
            wire.send(self._channels[rank], body)
        except OSError as error:
            raise self._rank_ended(rank, name) from error

    def _receive(self, rank: int, name: str) -> dict[str, Any]:
        try:
            return wire.receive(self._channels[rank])
        except (EOFError, OSError) as error:
            raise self._rank_ended(rank, name) from error

    def _rank_ended(self, rank: int, name: str) -> Retryable:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_LIMIT_S)
        return Retryable(
            f"rank {rank} of the trainer ended with code {process.returncode} during '{name}': see the trainer's log; "
            "the job resumes from its newest checkpoint"
        )


def _has_file_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True
