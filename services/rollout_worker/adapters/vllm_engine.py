"""vLLM behind the engine's port: `Rows` keeps the requests, `Core` makes the tokens, one thread goes between the two.

In each round vLLM is told which rows have come and gone since the last, and makes one step. A row that vLLM is not
running, because it is new, because the engine was suspended or because the weights changed, is given to it with the
tokens that it has: what it draws next depends on nothing else (see `vllm_draw`), so forgetting everything in vLLM is
always allowed, and is how KV caches are recomputed.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from services.rollout_worker.adapters.engine_thread import EngineThread
from services.rollout_worker.adapters.rows import NO_TOKEN, Rows
from services.rollout_worker.adapters.threaded_engine import ThreadedEngine
from services.rollout_worker.adapters.vllm_core import Core
from services.rollout_worker.ports import Key, Sequences
from shared.errors import Timeout

T = TypeVar("T")

_ANY_NUMBER = 1 << 40
"""Tokens to admit at once: vLLM itself cuts long prefixes into pieces."""
_READ_LIMIT_S = 60.0
"""How long reading one tensor back may take; a step of the engine may come before it."""


class VllmEngine(ThreadedEngine):
    """`ports.Engine` over vLLM.

    Args:
        core: vLLM, without weights; from now on everything of it happens on `thread`, on which it was made.
        thread: closed with the engine.
        slots: how many requests run at once, as vLLM was told.

    """

    def __init__(self, core: Core, thread: EngineThread, *, slots: int) -> None:
        self._core = core
        self._running: dict[Key, str] = {}
        """What vLLM runs, under which id."""
        self._complete = False
        """Whether every tensor has been loaded, and no load has failed since."""
        rows = Rows(slots, core.max_len, core.vocabulary)
        super().__init__(thread, rows, slots=slots, kv_tokens=core.kv_tokens, kv_page_tokens=core.kv_page_tokens)

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`. Each tensor is read when it is asked for, between two steps."""
        for name in self._core.names():
            yield name, self._read(partial(self._core.read, name))

    def _read(self, call: Callable[[], T]) -> T:
        try:
            return self._thread.ask(call).result(_READ_LIMIT_S)
        except concurrent.futures.TimeoutError:
            raise Timeout(f"the inference engine did not read its weights back in {_READ_LIMIT_S:.0f} s") from None

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        may_be_partial, self._complete = self._complete, False
        if not keep_kv:
            self._forget_kv()
        try:
            self._core.load(tensors, may_be_partial=may_be_partial)
            self._complete = True
        finally:
            if not self._complete:
                self._forget_kv()
            with self._thread.lock:
                self._rows.begin_version(version if self._complete else -1)

    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        self._core.wake()
        return self._core.score(sequences, temperature)

    def _forget_kv(self) -> None:
        self._core.abort(list(self._running.values()))
        self._running.clear()
        self._core.clear()

    def _suspend(self, *, keep_kv: bool) -> None:
        super()._suspend(keep_kv=keep_kv)
        if not keep_kv:
            self._core.sleep()

    def _resume(self) -> None:
        self._core.wake()
        super()._resume()

    def _end(self) -> None:
        self._core.close()

    def _round(self) -> None:
        with self._thread.lock:
            self._rows.retire_aborted()
            decode = self._can_decode()
            if decode:
                self._rows.admit(_ANY_NUMBER)
        self._end_others()
        if not decode or not self._rows.n:
            return
        self._begin_new()
        made = {one.request_id: one for one in self._core.step()}
        tokens = np.full(self._rows.n, NO_TOKEN, np.int64)
        logprobs = np.zeros(self._rows.n, np.float32)
        for row, request in enumerate(self._rows.requests):
            if (one := made.get(self._running[request.key])) is not None:
                tokens[row], logprobs[row] = one.token, one.logprob
        with self._thread.lock:
            self._rows.commit(tokens, logprobs)
        self._end_others()

    def _end_others(self) -> None:
        """End in vLLM what is no row any more."""
        gone = self._running.keys() - {request.key for request in self._rows.requests}
        self._core.abort([self._running.pop(key) for key in gone])

    def _begin_new(self) -> None:
        """Begin in vLLM the rows that it does not run."""
        for row, request in enumerate(self._rows.requests):
            if request.key not in self._running:
                made = self._rows.tokens(row)[len(request.prompt) :].tolist()
                self._running[request.key] = self._core.add(request, made)
