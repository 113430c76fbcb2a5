"""The processes that the trainer starts where several train one model, one a rank, seen from the trainer.

The trainer itself is none of them. It stays one asyncio process, and its engine's calls go to all ranks over a socket
each: so a rank can be killed, can run out of memory or hang in a collective, and the trainer is there to say so.
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

from services.trainer.adapters.ranks import wire
from shared.errors import Retryable, Timeout

CALL_LIMIT_S = 3600.0
"""No call takes longer, unless a rank hangs."""
_GRACE_S = 20.0
"""After one rank's failure the others get so long to fail or to finish too."""
_LAST_WORDS_S = 2.0
"""A process whose socket has closed gets so long to end with its own exit code."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Ranks:
    """Starts the processes at the first call; when one of them is gone, all of them go."""

    def __init__(self, kind: str, n: int, device: str, introduction: Callable[[int, str], dict[str, Any]]) -> None:
        """Prepare.

        Args:
            kind: `megatron` or `fsdp`.
            n: how many.
            device: `cpu` hides every GPU from them.
            introduction: (rank, path of a file to meet at) -> arguments of the first call.

        """
        self._kind = kind
        self._n = n
        self._device = device
        self._introduction = introduction
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._lock = threading.RLock()
        self._closed = False
        self._meeting: tempfile.TemporaryDirectory[str] | None = None
        self.rewritten: dict[str, int] = {}
        """Modules of a library that were rewritten to run here, and in how many places."""

    @property
    def pids(self) -> list[int]:
        """Return the ranks' process ids, rank 0 first; none before the first call."""
        return [process.pid for process in self._processes]

    def call(
        self, name: str, arguments: dict[str, Any] | Sequence[dict[str, Any]], answer: Answer | None = None
    ) -> list[Any]:
        """Make one call on every rank and wait for all results, rank 0 first.

        Args:
            name: of a method of `RankEngine`.
            arguments: for all ranks, or for each.
            answer: answers the questions that ranks ask meanwhile.

        Raises:
            Retryable: a rank's process is gone. All are then.
            RuntimeError: a rank failed in a way that nobody foresaw.
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
            return self._exchange(name, [{"call": name, "arguments": own} for own in each], answer)

    def close(self) -> None:
        """End all processes at once, and whatever call is under way."""
        self._closed = True
        self._kill()
        with self._lock:  # the call is through: its ranks are gone
            self._kill()
            for process, channel in zip(self._processes, self._channels, strict=True):
                process.wait()
                channel.close()
            if self._meeting is not None:
                self._meeting.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self._device == "cpu":
            # All ranks are on this machine; without a name server, too.
            environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        else:
            # Tensor and sequence parallelism rely on kernels starting in the order in which they were launched.
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        for _ in range(self._n):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "services.trainer.adapters.ranks.rank", str(theirs.fileno()), self._kind]
            with theirs:
                # A session of its own: an interrupt from the keyboard is for the trainer.
                process = subprocess.Popen(  # noqa: S603 - our own module
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            ours.settimeout(CALL_LIMIT_S)
            self._processes.append(process)
            self._channels.append(ours)
        # It stays: NCCL's communicators come to be when they are first used, and meet there, too.
        self._meeting = tempfile.TemporaryDirectory(prefix="rlboost-ranks-")
        meeting = str(Path(self._meeting.name) / "meeting")
        first = [{"call": "", "arguments": self._introduction(rank, meeting)} for rank in range(self._n)]
        self.rewritten = self._exchange("start", first, None)[0]

    def _exchange(self, name: str, requests: Sequence[dict[str, Any]], answer: Answer | None) -> list[Any]:
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
                # Those that have not answered wait for one that has given up.
                self.close()
            rank = min(failed)
            raise wire.as_error(rank, failed[rank])
        return [results[rank]["result"] for rank in range(self._n)]

    def _collect(self, name: str, results: dict[int, dict[str, Any]], answer: Answer | None) -> None:
        """Take messages until every rank has its result, or one failed and the grace is over."""
        limit = time.monotonic() + CALL_LIMIT_S
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(results) < self._n:
                ready = selector.select(max(0.0, limit - time.monotonic()))
                if not ready:
                    if any("error" in body for body in results.values()):
                        return
                    silent = sorted(set(range(self._n)) - set(results))
                    raise Timeout(f"ranks {silent} of the trainer did not answer '{name}' within {CALL_LIMIT_S:g} s")
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
            raise self._lost(rank, name) from error

    def _receive(self, rank: int, name: str) -> dict[str, Any]:
        try:
            return wire.receive(self._channels[rank])
        except (EOFError, OSError) as error:
            raise self._lost(rank, name) from error

    def _lost(self, rank: int, name: str) -> Retryable:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        return Retryable(
            f"rank {rank} of the trainer ended with code {process.returncode} during '{name}': its last words are in "
            "the trainer's log; the job goes on from its newest checkpoint"
        )


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True
