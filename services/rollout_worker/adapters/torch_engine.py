"""The built-in engine: continuous batching over any full-attention Hugging Face causal LM, on a CPU or a CUDA device.

One thread, `torch-engine`, owns the model, the cache and the rows' progress. It runs in rounds: at the boundary between
two decode steps it does what the event loop asked for (load, suspend, end aborted rows), then it admits and prefills
what fits, then it decodes one token for every row. It sleeps on a condition while there is nothing to do. The event
loop's thread only queues, marks and drains under the lock, which the engine's thread holds for moments.

A prefix is everything but a row's newest token. Prefill only fills the cache with it; the newest token goes through the
model in the next decode step like everybody else's, so there is one place where tokens are drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from services.rollout_worker.adapters import torch_model
from services.rollout_worker.adapters.rows import Rows
from services.rollout_worker.adapters.torch_cache import SlotCache
from services.rollout_worker.adapters.torch_sampling import draw
from services.rollout_worker.domain.uniforms import uniforms
from services.rollout_worker.ports import Emission, EngineStats, Key, Request
from shared.errors import ConfigError, Fatal, RLBoostError

_PREFILL_TOKENS = 4096
"""Tokens, padding included, that one prefill pass takes at most, unless a single prefix is longer: it bounds both the
memory of a pass and how long running rows wait for new ones."""
_ADMIT_STEPS = 4
"""Decode steps between two admissions while most slots are busy: a prefill pass for one row costs nearly as much as for
ten, and idle slots cost little."""
_SORT_STEPS = 16
"""Decode steps between two looks at whether sorting the rows by length would pay."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine:
    """`ports.Engine` in this process.

    Args:
        directory: holds the model's `config.json`; weights come through `load_weights`.
        slots: how many requests run at once.
        device: "cpu" or a CUDA device.
        dtype: of weights, activations and cache; sampling is in float32.

    Raises:
        ConfigError: the directory, the device or the model's architecture cannot be used.

    """

    def __init__(
        self, directory: Path, *, slots: int, device: str = "cpu", dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        self.slots = slots
        self._device = _usable_device(device)
        self._model = torch_model.build(directory, DTYPES[dtype], self._device)
        self._weights = torch_model.Weights(self._model)
        max_len = torch_model.max_length(self._model)
        self._cache = SlotCache(slots, max_len, DTYPES[dtype], self._device)
        self._cache_is_stale = False
        self._steps = 0

        # Shared with the event loop's thread, under this lock:
        self._wake = threading.Condition()
        self._rows = Rows(slots, max_len, self._model.get_input_embeddings().num_embeddings)
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._suspended = False
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # --- from the event loop ------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """See `ports.Engine`."""
        with self._wake:
            self._check_alive()
            self._rows.submit(requests)
            self._wake.notify()

    def abort(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        with self._wake:
            self._check_alive()
            self._rows.abort(keys)
            self._wake.notify()

    def release(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        with self._wake:
            self._check_alive()
            self._rows.release(keys)
            self._wake.notify()

    def drain(self) -> list[Emission]:
        """See `ports.Engine`."""
        with self._wake:
            self._check_alive(closed_is_fine=True)
            return self._rows.drain()

    def stats(self) -> EngineStats:
        """See `ports.Engine`."""
        with self._wake:
            self._check_alive(closed_is_fine=True)
            return EngineStats(self._rows.n, len(self._rows.pending), self._rows.made_total, self._rows.version)

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `ports.Engine`."""
        await self._call(lambda: self._load(version, tensors))

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`."""
        return iter(self._weights)

    async def suspend(self) -> None:
        """See `ports.Engine`."""
        await self._call(lambda: self._set_suspended(suspended=True))

    async def resume(self) -> None:
        """See `ports.Engine`."""
        await self._call(lambda: self._set_suspended(suspended=False))

    async def close(self) -> None:
        """See `ports.Engine`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        # Not a thread of asyncio's pool that joins this one: the process's end would wait for it, whatever the limit.
        with contextlib.suppress(Fatal):
            await self.wait_failed()
        self._thread.join(1.0)  # it has nothing left to do: a process must not end while it unwinds

    async def wait_failed(self) -> None:
        """See `ports.Engine`."""
        # shielded: a waiter that is cancelled must not cancel what others wait for
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def _check_alive(self, *, closed_is_fine: bool = False) -> None:
        if self._ended.done() and (error := self._ended.exception()) is not None:
            raise Fatal(str(error)) from error.__cause__
        if self._closing and not closed_is_fine:
            raise Fatal("the inference engine is closed")

    async def _call(self, call: Callable[[], None]) -> None:
        """Have the engine's thread run `call` at the next boundary."""
        done: Future[None] = Future()
        with self._wake:
            self._check_alive()
            self._calls.append((call, done))
            self._wake.notify()
        await asyncio.wrap_future(done)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Fatal | None = None
        try:
            with torch.inference_mode():
                while self._boundary():
                    self._round()
        except Exception as error:  # noqa: BLE001 - the thread's end: whatever it was, the event loop must hear of it
            failure = Fatal(f"the inference engine died: {error!r}")
            failure.__cause__ = error
        with self._wake:
            left, self._calls = self._calls, deque()
            if failure is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(failure)
        for _, done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure or Fatal("the inference engine is closed"))

    def _boundary(self) -> bool:
        """Do what was asked for, and sleep until there is something to decode; False at the end."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_something_to_do)
                if self._closing:
                    return False
                moves = self._rows.retire_aborted()
                call = self._calls.popleft() if self._calls else None
                ready = call is None and self._can_decode()
            self._cache.move(moves)
            if call is not None:
                _run_call(*call)
            elif ready:
                return True

    def _has_something_to_do(self) -> bool:
        return self._closing or bool(self._calls) or self._rows.any_aborted or self._can_decode()

    def _can_decode(self) -> bool:
        return not self._suspended and self._rows.version >= 0 and (self._rows.n > 0 or len(self._rows.pending) > 0)

    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._cache_is_stale = True
        try:
            self._weights.load(tensors)
        finally:
            with self._wake:
                self._rows.begin_version(version if self._weights.complete else -1)

    def _set_suspended(self, *, suspended: bool) -> None:
        with self._wake:
            self._suspended = suspended
        if suspended:
            self._cache_is_stale = True
            self._cache.clear()

    def _round(self) -> None:
        with self._wake:
            busy = 2 * self._rows.n >= self.slots
            new = range(0) if busy and self._steps % _ADMIT_STEPS else self._rows.admit(_PREFILL_TOKENS)
            n = self._rows.n
        if self._cache_is_stale:
            self._cache.clear()
            self._cache_is_stale, new = False, range(n)
        self._prefill(new)
        if n > 0:
            self._sort()
            self._decode()
        self._steps += 1

    def _prefill(self, rows: Iterable[int]) -> None:
        """Fill the cache with the prefixes of `rows`; rows with the same prefix, such as a group's, share one pass."""
        sharing: dict[bytes, list[int]] = {}
        for row in rows:
            if (prefix := self._rows.prefix(row)).size:
                sharing.setdefault(prefix.tobytes(), []).append(row)
        groups = sorted(sharing.values(), key=lambda rows: -self._rows.prefix(rows[0]).size)
        while groups:
            length = self._rows.prefix(groups[0][0]).size
            n = max(1, _PREFILL_TOKENS // length)
            batch, groups = groups[:n], groups[n:]
            tokens = np.zeros((len(batch), length), np.int64)
            for source, shared in enumerate(batch):
                prefix = self._rows.prefix(shared[0])
                tokens[source, : prefix.size] = prefix
            sources = np.repeat(np.arange(len(batch)), [len(shared) for shared in batch])
            self._cache.begin_prefill(np.concatenate(batch), sources, length)
            torch_model.prefill(self._model, torch.from_numpy(tokens).to(self._device), self._cache)

    def _sort(self) -> None:
        if self._steps % _SORT_STEPS == 0 and (order := self._cache.order(self._rows.positions)) is not None:
            with self._wake:
                self._rows.reorder(order)
            self._cache.reorder(order)

    def _decode(self) -> None:
        rows, positions = self._rows, self._rows.positions
        self._cache.begin_decode(positions)
        newest, at = (torch.from_numpy(a).to(self._device) for a in (rows.newest, positions))
        logits = torch_model.decode(self._model, newest, at, self._cache)
        drawn = draw(logits, rows.temperature, rows.top_p, uniforms(rows.seeds, rows.offsets))
        tokens, logprobs = (tensor.cpu().numpy() for tensor in drawn)
        with self._wake:
            moves = rows.commit(tokens, logprobs)
        self._cache.move(moves)
        if not np.isfinite(logprobs).all():
            # It may have reached the cache, where even a masked column would spoil the slot's next owner.
            self._cache_is_stale = True


def _run_call(call: Callable[[], None], done: Future[None]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        call()
    except RLBoostError as error:
        done.set_exception(error)
    except Exception as error:
        done.set_exception(Fatal(f"the inference engine died: {error!r}"))
        raise
    else:
        done.set_result(None)


def _usable_device(name: str) -> torch.device:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"engine device {name!r} cannot be used: {error}") from error
    return torch.device(name)
