"""Sends each call to all ranks over sockets, and collects their results.

The trainer is not a rank. It stays one asyncio process, so it survives and reports a rank that is killed, runs out of
memory or hangs in a collective.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlboost.services.trainer.adapters.ranks import transport
from rlboost.services.trainer.adapters.ranks.layout import Layout
from rlboost.shared.errors import DiskFull, Retryable, WaitTimedOut

CALL_LIMIT_S = 3600.0
"""Limit of one call; a rank that takes longer hangs."""
_GRACE_S = 20.0
"""How long the other ranks may take to finish or fail after the first failure."""

AnswerFn = Callable[[dict[str, Any]], dict[str, Any]]


class Launcher(Protocol):
    """Starts the rank processes of a job."""

    @property
    def layout(self) -> Layout:
        """How the ranks split the work."""

    @property
    def init_method(self) -> str:
        """Where the started ranks find each other, as `init_process_group` takes it."""

    @property
    def pids(self) -> Sequence[int]:
        """The started ranks' process ids, rank 0 first; empty if they are on other machines."""

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank on its machine, and of its GPU."""

    def start(self, kind: str) -> list[socket.socket]:
        """Start the ranks, of kind `megatron` or `fsdp`; return a channel to each, rank 0 first.

        Raises:
            Retryable: a rank cannot be started now.

        """

    def kill(self) -> None:
        """Kill all ranks, without waiting for their end. Any thread may call it."""

    def close(self) -> None:
        """Kill all ranks and release what they used."""

    def describe_end(self, rank: int) -> str:
        """Return how a rank ended whose channel has closed: `ended with code -9`."""


class RankCalls:
    """Calls methods of `RankEngine` on all ranks. The first call starts them; if one rank ends, all are killed."""

    def __init__(self, kind: str, launcher: Launcher, arguments: dict[str, Any]) -> None:
        """Describe the ranks; the first call starts them.

        Args:
            kind: `megatron` or `fsdp`.
            launcher: starts the ranks.
            arguments: those of `RankEngine` that are the same for all ranks and do not depend on the launcher.

        """
        self._kind = kind
        self._launcher = launcher
        self._arguments = arguments
        self._channels: list[socket.socket] = []
        self._lock = threading.RLock()
        self._closed = False

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of ranks on this machine, rank 0 first; empty before the first call."""
        return self._launcher.pids

    @property
    def _n(self) -> int:
        return len(self._channels)

    def call(
        self, name: str, arguments: dict[str, Any] | Sequence[dict[str, Any]], answer: AnswerFn | None = None
    ) -> list[Any]:
        """Make one call on every rank and wait for all results, rank 0 first.

        Args:
            name: a method of `RankEngine`.
            arguments: the same for all ranks, or one mapping per rank.
            answer: answers the questions that ranks ask during the call.

        Raises:
            Retryable: a rank's process has ended; all are killed.
            RuntimeError: a rank raised an unexpected error.
            RLBoostError: a rank raised it.

        """
        with self._lock:
            if not self._channels and not self._closed:
                try:
                    self._start()
                except BaseException:
                    self.close()
                    raise
            each = [arguments] * self._n if isinstance(arguments, dict) else arguments
            return self._exchange(name, [{"call": name, "arguments": one} for one in each], answer)

    def close(self) -> None:
        """Kill all ranks at once; a call in progress fails."""
        self._closed = True
        self._launcher.kill()
        with self._lock:  # free once the call in progress has failed
            self._launcher.close()
            for channel in self._channels:
                channel.close()

    def _start(self) -> None:
        launcher = self._launcher
        self._channels = launcher.start(self._kind)
        for channel in self._channels:
            channel.settimeout(CALL_LIMIT_S)
        common = {**self._arguments, "layout": launcher.layout, "init_method": launcher.init_method}
        each = [{**common, "rank": rank, "local_rank": launcher.local_rank(rank)} for rank in range(self._n)]
        self._exchange("start", [{"call": "", "arguments": one} for one in each], None)

    def _exchange(self, name: str, requests: Sequence[dict[str, Any]], answer: AnswerFn | None) -> list[Any]:
        if self._closed:
            raise Retryable("the ranks have ended: see their logs; the job resumes from its newest checkpoint")
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
            raise transport.decode_error(rank, failed[rank])
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
                    raise WaitTimedOut(
                        f"ranks {missing} of the trainer did not answer '{name}' within {CALL_LIMIT_S:g} s: see their "
                        "logs; the job resumes from its newest checkpoint"
                    )
                for key, _ in ready:
                    body = self._receive(key.data, name)
                    if "ask" in body:
                        assert answer is not None
                        self._send(key.data, name, answer(body))
                        continue
                    results[key.data] = body
                    # On a full disk the others still finish: no collective fails.
                    if body.get("error", DiskFull.__name__) != DiskFull.__name__:
                        limit = min(limit, time.monotonic() + _GRACE_S)

    def _send(self, rank: int, name: str, body: dict[str, Any]) -> None:
        try:
            transport.send(self._channels[rank], body)
        except OSError as error:
            raise self._rank_ended(rank, name) from error

    def _receive(self, rank: int, name: str) -> dict[str, Any]:
        try:
            return transport.receive(self._channels[rank])
        except (EOFError, OSError) as error:
            raise self._rank_ended(rank, name) from error

    def _rank_ended(self, rank: int, name: str) -> Retryable:
        return Retryable(
            f"rank {rank} of the trainer {self._launcher.describe_end(rank)} during '{name}': see its log; the job "
            "resumes from its newest checkpoint"
        )
