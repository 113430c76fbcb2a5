"""Base class of engines that keep their requests in a `RequestTable`: all of `ports.Engine` but the model's part.

The event loop's thread only queues, marks and takes emissions under the lock, which the engine's thread holds briefly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlboost.services.rollout_worker.adapters.engine.thread import EngineThread
from rlboost.services.rollout_worker.domain.load import EngineStats
from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey
from rlboost.services.rollout_worker.ports import Sequences, StagedWeights
from rlboost.shared.process.threads import run_in_thread

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


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
        self._thread = thread
        self._table = table
        self._suspended = False
        thread.run_rounds(has_work=self._has_work, round_=self._round, on_end=self._shut_down)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._table.submit(requests)
            self._thread.lock.notify()

    def abort(self, keys: Iterable[RequestKey]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._table.abort(keys)
            self._thread.lock.notify()

    def release(self, keys: Iterable[RequestKey]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._table.release(keys)
            self._thread.lock.notify()

    def take_emissions(self) -> list[Emission]:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive(allow_closed=True)
            return self._table.take_emissions()

    def stats(self) -> EngineStats:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive(allow_closed=True)
            return EngineStats(
                self._table.n, len(self._table.pending), self._table.generated_total, self._table.version
            )

    def running(self) -> set[RequestKey]:
        """See `ports.Engine`."""
        with self._thread.lock:
            return {request.key for request in self._table.requests}

    async def load_weights(
        self, version: int, weights: StagedWeights, changed: Container[str] | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.Engine`; compares what is in the engine's memory."""
        await self._call(lambda: self._load(version, weights.tensors(changed), keep_kv=keep_kv))
        return await run_in_thread("weights-verify", lambda: weights.differing(self.loaded_tensors()))

    async def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `ports.Engine`."""
        return await self._call(lambda: self._score(sequences, temperature))

    async def suspend(self, *, keep_kv: bool = False) -> None:
        """See `ports.Engine`."""
        await self._call(lambda: self._suspend(keep_kv=keep_kv))

    async def resume(self) -> None:
        """See `ports.Engine`."""
        await self._call(self._resume)

    async def close(self) -> None:
        """See `ports.Engine`."""
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
        return not self._suspended and self._table.version >= 0 and (self._table.n > 0 or len(self._table.pending) > 0)

    @abstractmethod
    def _round(self) -> None:
        """Remove aborted requests and, if `_can_decode`, generate tokens."""

    @abstractmethod
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        """See `load_weights`; must call `begin_version` of the table with the outcome."""

    @abstractmethod
    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `score`."""

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
