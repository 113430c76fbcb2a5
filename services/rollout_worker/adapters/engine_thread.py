"""Base class of engines that keep their requests in a `RequestTable`: all of `ports.Engine` but the model's part.

The event loop's thread only queues, marks and takes emissions under the lock, which the engine's thread holds briefly.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from rlboost.services.rollout_worker.domain.load import EngineStats
from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey
from rlboost.services.rollout_worker.ports import (
    AdapterEngine,
    Changes,
    EngineClosed,
    EngineFailed,
    Sequences,
    StagedWeights,
)
from rlboost.shared.errors import Fatal, RLBoostError
from rlboost.shared.process.system import run_in_thread

if TYPE_CHECKING:
    import torch

    from rlboost.shared.weights.changed_words import ChangedWords

log = structlog.get_logger(__name__)


# --- The thread that owns an inference engine: runs rounds, and calls from other threads between two rounds -----------


T = TypeVar("T")


class EngineThread:
    """Runs rounds in its own thread once `run_rounds` has set them.

    An `RLBoostError` raised by a call goes to the caller. Any other error, and any error of a round, ends the engine.

    Args:
        name: the thread's name.

    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Condition()
        """Guards the state that the engine shares with other threads; notify it when there may be work."""
        self._has_work: Callable[[], bool] = lambda: False
        self._round: Callable[[], None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def run_rounds(
        self, *, has_work: Callable[[], bool], round_: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """Run rounds from now on.

        Args:
            has_work: called under `lock`; returns True if there is a round to run.
            round_: runs one round; called without the lock.
            on_end: called as the last thing on the thread.

        """
        with self.lock:
            self._has_work, self._round, self._on_end = has_work, round_, on_end
            self.lock.notify()

    def check_alive(self, *, allow_closed: bool = False) -> None:
        """Raise `EngineFailed` if the engine died, `EngineClosed` if it was closed. Called under `lock`."""
        if self._ended.done() and (error := self._ended.exception()) is not None:
            raise EngineFailed(str(error)) from error.__cause__
        if self._closing and not allow_closed:
            raise EngineClosed("the inference engine is closed")

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two rounds; cancelling the future before it starts withdraws it."""
        done: Future[T] = Future()
        with self.lock:
            self.check_alive()
            self._calls.append((function, done))
            self.lock.notify()
        return done

    async def close(self) -> None:
        """Stop for good, after the current round, and wait until the thread has ended; idempotent."""
        with self.lock:
            self._closing = True
            self.lock.notify()
        # Not joined in a thread of asyncio's pool: the end of the process would wait for that thread without a limit.
        with contextlib.suppress(Fatal):
            # Shielded: cancelling this wait must not cancel the future, which the thread sets.
            await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join(1.0)  # it only unwinds: the process must not end before

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Fatal | None = None
        try:
            while self._between_rounds():
                self._round()
        except Exception as error:  # noqa: BLE001 - ends the thread; `check_alive` raises it
            failure = _death(error)
        try:
            self._on_end()
        except Exception as error:  # noqa: BLE001 - as above
            failure = failure or _death(error)
        with self.lock:
            uncalled, self._calls = self._calls, deque()
            if failure is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(failure)
        for _, done in uncalled:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure or EngineClosed("the inference engine is closed"))

    def _between_rounds(self) -> bool:
        """Run queued calls and wait until there is a round to run; return False at the end."""
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._closing or bool(self._calls) or self._has_work())
                if self._closing:
                    return False
                if not self._calls:
                    return True
                function, done = self._calls.popleft()
            _run_call(function, done)


def _run_call(function: Callable[[], T], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except RLBoostError as error:
        done.set_exception(error)
    except Exception as error:
        done.set_exception(_death(error))
        raise
    else:
        done.set_result(result)


def _death(error: Exception) -> EngineFailed:
    failure = EngineFailed(f"the inference engine died: {error!r}")
    failure.__cause__ = error
    return failure


class ThreadedEngine(ABC):
    """`ports.Engine` except for the abstract methods. Those with an underscore run on the engine's thread.

    Args:
        thread: closed with the engine.
        table: the requests; shared between threads, under the thread's lock.
        slots: maximum number of running requests.
        kv_tokens: see `ports.Engine`; ignored if the table knows its capacity.
        kv_block_tokens: see `ports.Engine`.

    """

    def __init__(
        self, thread: EngineThread, table: RequestTable, *, slots: int, kv_tokens: int = 0, kv_block_tokens: int = 0
    ) -> None:
        self.slots = slots
        self.kv_tokens = table.capacity.tokens if table.capacity else kv_tokens
        self.kv_block_tokens = kv_block_tokens
        self.max_request_tokens = table.capacity.max_request_tokens if table.capacity else 0
        self.returns_routed_experts = table.returns_routed_experts
        self.sampling_options = table.options
        self.adapters: AdapterEngine | None = None
        self._thread = thread
        self._table = table
        self._suspended = False
        thread.run_rounds(has_work=self._has_work, round_=self._round, on_end=self._shut_down)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self._thread.lock:
            self._thread.check_alive()
            self._table.submit(requests)
            self._thread.lock.notify()

    def abort(self, keys: Iterable[RequestKey]) -> None:
        with self._thread.lock:
            self._thread.check_alive()
            self._table.abort(keys)
            self._thread.lock.notify()

    def release(self, keys: Iterable[RequestKey]) -> None:
        with self._thread.lock:
            self._thread.check_alive()
            self._table.release(keys)
            self._thread.lock.notify()

    def hint(self, completions: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `ports.Engine`; ignored."""
        del completions
        with self._thread.lock:
            self._thread.check_alive()

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """See `ports.Engine`; a request that the engine does not support has ended with an error."""
        del key, images

    def take_emissions(self) -> list[Emission]:
        with self._thread.lock:
            self._thread.check_alive(allow_closed=True)
            return self._table.take_emissions()

    def stats(self) -> EngineStats:
        with self._thread.lock:
            self._thread.check_alive(allow_closed=True)
            table = self._table
            return EngineStats(
                table.n, len(table.pending), table.generated_total, table.version, can_generate=not table.is_idle
            )

    def running(self) -> set[RequestKey]:
        with self._thread.lock:
            return {request.key for request in self._table.requests}

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.Engine`; compares what is in the engine's memory, or the words of it that it has changed."""
        if changes is not None and (words := changes.words) is not None:
            why = await self._call(lambda: self._load_words(version, words, keep_kv=keep_kv))
            if not why:
                return []
            log.warning("weights_loaded_whole", version=version, reason=why)
            changes = None
        names = None if changes is None else changes.names
        await self._call(lambda: self._load(version, weights.tensors(names), keep_kv=keep_kv))
        return await self.differing(weights)

    async def differing(self, weights: StagedWeights) -> list[str]:
        return await run_in_thread("weights-verify", lambda: weights.differing(self.loaded_tensors()))

    async def score(self, sequences: Sequences, temperature: float, job_id: str = "") -> list[list[float]]:
        return await self._call(lambda: self._score(sequences, temperature, job_id))

    async def sample(self, requests: Sequence[Request]) -> list[Emission]:
        return await self._call(lambda: self._sample(requests))

    async def suspend(self, *, keep_kv: bool = False) -> None:
        await self._call(lambda: self._suspend(keep_kv=keep_kv))

    async def resume(self) -> None:
        await self._call(self._resume)

    async def close(self) -> None:
        await self._thread.close()

    @abstractmethod
    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in the engine's memory, under Hugging Face names, in the engine's dtype, without copying.

        Tied tensors are yielded under each of their names.
        """

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return self._table.any_aborted or self._can_decode()

    def _can_decode(self) -> bool:
        return not self._suspended and self._table.version >= 0 and not self._table.is_idle

    @abstractmethod
    def _round(self) -> None:
        """Remove aborted requests and, if `_can_decode`, generate tokens."""

    @abstractmethod
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        """See `load_weights`; must call `begin_version` of the table with the outcome."""

    @abstractmethod
    def _load_words(self, version: int, words: ChangedWords, *, keep_kv: bool) -> str:
        """Write changed words; as `_load`, but returns why a load of all tensors must follow, else empty."""

    @abstractmethod
    def _score(self, sequences: Sequences, temperature: float, job_id: str) -> list[list[float]]:
        """See `score`."""

    @abstractmethod
    def _sample(self, requests: Sequence[Request]) -> list[Emission]:
        """See `sample`."""

    @abstractmethod
    def _clear_kv(self) -> None:
        """Drop all keys and values and free their memory; running requests are prefilled again on resume."""

    def _suspend(self, *, keep_kv: bool) -> None:
        with self._thread.lock:
            self._suspended = True
        if not keep_kv:
            self._clear_kv()

    def _resume(self) -> None:
        with self._thread.lock:
            self._suspended = False

    @abstractmethod
    def _shut_down(self) -> None:
        """Free everything; the last call on the thread."""
