"""The ranks of a job: how they split the work, how those on this machine start, and calls to all of them over sockets.

The trainer is not a rank. It stays one asyncio process, so it survives and reports a rank that is killed, runs out of
memory or hangs in a collective.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgpack

from rlboost.shared import errors
from rlboost.shared.errors import ConfigError, DiskFull, ProcessEnded, Retryable, RLBoostError, WaitTimedOut
from rlboost.shared.framing import LENGTH_BYTES, length_of, pack
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.tls import CA_VARIABLE

if TYPE_CHECKING:
    from torch import Tensor

# --- How ranks split the work: tensor, pipeline, context, data and expert parallelism ---------------------------------


class Layout(NamedTuple):
    """The degrees of parallelism of one model."""

    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    distributed_optimizer: bool
    context: int = 1
    expert: int = 1
    """Neighboring copies (`Coordinates.copy`) that each hold a part of every layer's experts; divides `data`."""

    fsdp_size: int = 0
    """Neighboring ranks over which FSDP2 shards the model; 0: all, however many remain after machines were lost."""

    @classmethod
    def of(cls, spec: TrainerSpec) -> Layout:
        """Return the layout that a job file requests."""
        return cls(
            spec.tensor_parallel,
            spec.pipeline_parallel,
            spec.data_parallel,
            spec.sequence_parallel,
            spec.distributed_optimizer,
            spec.context_parallel,
            spec.expert_parallel,
            spec.fsdp_size,
        )

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def n_shards(self) -> int:
        """Number of ranks over which FSDP2 shards the model."""
        return self.fsdp_size or self.n_ranks


class Coordinates(NamedTuple):
    """One rank's coordinates in the layout."""

    tensor: int
    pipeline: int
    data: int
    context: int = 0

    @classmethod
    def of(cls, rank: int, layout: Layout) -> Coordinates:
        """Return the coordinates that megatron-core gives a rank: tensor varies fastest, then context."""
        outer, tensor = divmod(rank, layout.tensor)
        outer, context = divmod(outer, layout.context)
        pipeline, data = divmod(outer, layout.data)
        return cls(tensor, pipeline, data, context)

    def replica_index(self, layout: Layout) -> int:
        """Return the rank's index among the `data` x `context` ranks that hold the same part of the dense model."""
        return self.data * layout.context + self.context

    def expert_part(self, layout: Layout) -> int:
        """Return the index of the part of every layer's experts that the rank holds, of `layout.expert` parts."""
        return self.replica_index(layout) % layout.expert


def require_divisible_heads(n_heads: int, context: int) -> None:
    """Check that context parallelism can divide a model's attention.

    Raises:
        ConfigError: it cannot.

    """
    if n_heads % context:
        raise ConfigError(
            f"trainer.context_parallel is {context}, which does not divide the model's {n_heads} attention heads: "
            "change it"
        )


# --- The rectangular slice of a tensor that one rank owns -------------------------------------------------------------


class TensorSlice(NamedTuple):
    """A rectangular slice of a Hugging Face tensor."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that is the whole tensor."""
        return cls(name, shape, (0,) * len(shape), shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The first index after the slice, in each dimension."""
        return tuple(low + n for low, n in zip(self.offset, self.local_shape, strict=True))

    def of(self, whole: Tensor) -> Tensor:
        """Return this slice of the whole tensor; it shares the tensor's memory."""
        return whole[tuple(slice(low, high) for low, high in zip(self.offset, self.end, strict=True))]


# --- Sends and receives the messages between the trainer and its ranks, errors among them; blocks ---------------------


def send(channel: socket.socket, body: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the peer's process has ended.

    """
    channel.sendall(pack(body))


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        EOFError: the peer has closed the connection.
        OSError: the peer's process has ended.

    """
    length = length_of(_read_exactly(channel, LENGTH_BYTES))
    body: dict[str, Any] = msgpack.unpackb(_read_exactly(channel, length))
    return body


def _read_exactly(channel: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    unread = memoryview(data)
    while unread:
        n = channel.recv_into(unread)
        if not n:
            raise EOFError
        unread = unread[n:]
    return data


def encode_error(error: BaseException, trace: str) -> dict[str, str]:
    """Return an error as a message: the project's own by class and text, any other by its traceback."""
    known = isinstance(error, RLBoostError)
    return {"error": type(error).__name__ if known else "", "text": str(error) if known else trace}


def decode_error(rank: int, body: dict[str, Any]) -> Exception:
    """Return a rank's error, as the same class if it is one of the project's, else as `RuntimeError`."""
    kind = getattr(errors, body["error"], None) if body["error"] else None
    if isinstance(kind, type) and issubclass(kind, RLBoostError):
        return kind(body["text"])
    return RuntimeError(f"rank {rank} of the trainer failed:\n{body['text']}")


# --- Calls to all ranks -----------------------------------------------------------------------------------------------


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
            raise decode_error(rank, failed[rank])
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
            send(self._channels[rank], body)
        except OSError as error:
            raise self._rank_ended(rank, name) from error

    def _receive(self, rank: int, name: str) -> dict[str, Any]:
        try:
            return receive(self._channels[rank])
        except (EOFError, OSError) as error:
            raise self._rank_ended(rank, name) from error

    def _rank_ended(self, rank: int, name: str) -> ProcessEnded:
        return ProcessEnded(
            f"rank {rank} of the trainer {self._launcher.describe_end(rank)} during '{name}': see its log; the job "
            "resumes from its newest checkpoint"
        )


# --- Starts the rank processes on the trainer's own machine, with a socket pair to each -------------------------------


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
        return [process.pid for process in self._processes]

    @property
    def init_method(self) -> str:
        assert self._rendezvous is not None, "start first"
        return f"file://{Path(self._rendezvous.name) / 'rendezvous'}"

    def local_rank(self, rank: int) -> int:
        return rank

    def start(self, kind: str) -> list[socket.socket]:
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
                "rlboost.services.trainer.adapters.torch.rank",
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
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        self.kill()
        for process in self._processes:
            process.wait()
        if self._rendezvous is not None:
            self._rendezvous.cleanup()

    def describe_end(self, rank: int) -> str:
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
