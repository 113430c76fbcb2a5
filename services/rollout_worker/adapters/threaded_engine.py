"""What engines that keep their requests in `Rows` have in common: all of the port but what the model does.

The event loop's thread only queues, marks and drains under the lock, which the engine's thread holds for moments.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from services.rollout_worker.adapters.engine_thread import EngineThread
from services.rollout_worker.adapters.rows import Rows
from services.rollout_worker.ports import Emission, EngineStats, Key, Request, Sequences

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ThreadedEngine(ABC):
    """`ports.Engine`, but for the methods that are abstract here; those run on the engine's thread, between two rounds.

    Args:
        thread: closed with the engine.
        rows: shared between threads, under the thread's lock.
        slots: how many requests run at once.
        kv_tokens: see `ports.Engine`; that of the rows' room, where they have one.
        kv_page_tokens: see `ports.Engine`.

    """

    def __init__(
        self, thread: EngineThread, rows: Rows, *, slots: int, kv_tokens: int = 0, kv_page_tokens: int = 0
    ) -> None:
        self.slots = slots
        self.kv_tokens = rows.room.tokens if rows.room else kv_tokens
        self.kv_row_tokens = rows.room.max_len if rows.room else 0
        self.kv_page_tokens = kv_page_tokens
        self._thread = thread
        self._rows = rows
        self._suspended = False
        thread.run_rounds(has_work=self._has_work, round_=self._round, at_end=self._end)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._rows.submit(requests)
            self._thread.lock.notify()

    def abort(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._rows.abort(keys)
            self._thread.lock.notify()

    def release(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            self._rows.release(keys)
            self._thread.lock.notify()

    def drain(self) -> list[Emission]:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive(closed_is_fine=True)
            return self._rows.drain()

    def stats(self) -> EngineStats:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive(closed_is_fine=True)
            return EngineStats(self._rows.n, len(self._rows.pending), self._rows.made_total, self._rows.version)

    def running(self) -> set[Key]:
        """See `ports.Engine`."""
        with self._thread.lock:
            return {request.key for request in self._rows.requests}

    async def load_weights(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool = False
    ) -> None:
        """See `ports.Engine`."""
        await self._call(lambda: self._load(version, tensors, keep_kv=keep_kv))

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

    async def wait_failed(self) -> None:
        """See `ports.Engine`."""
        await self._thread.wait_ended()

    @abstractmethod
    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`."""

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.ask(call))

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return self._rows.any_aborted or self._can_decode()

    def _can_decode(self) -> bool:
        return not self._suspended and self._rows.version >= 0 and (self._rows.n > 0 or len(self._rows.pending) > 0)

    @abstractmethod
    def _round(self) -> None:
        """Take out the rows that were aborted, and if `_can_decode`, make tokens."""

    @abstractmethod
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        """See `load_weights`; `_rows.begin_version` is told what came of it."""

    @abstractmethod
    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `score`."""

    @abstractmethod
    def _forget_kv(self) -> None:
        """Forget all keys and values, and give their memory back; rows are read in again when they go on."""

    def _suspend(self, *, keep_kv: bool) -> None:
        with self._thread.lock:
            self._suspended = True
        if not keep_kv:
            self._forget_kv()

    def _resume(self) -> None:
        with self._thread.lock:
            self._suspended = False

    @abstractmethod
    def _end(self) -> None:
        """Give everything back: nothing more will run on the thread."""
