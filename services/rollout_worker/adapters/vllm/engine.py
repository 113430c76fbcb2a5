"""`ports.Engine` over vLLM: `RequestTable` keeps the requests, `VllmCore` generates the tokens.

In each round, vLLM gets the requests that have started and ended since the last round, and runs one step. A running
request that vLLM does not know (it is new, the engine was suspended, or the weights changed) is added with its prompt
and its tokens so far. Its next tokens depend on nothing else (see `seeded_sampling`), so vLLM's state may be dropped at
any time; this is how KV caches are recomputed.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from rlboost.services.rollout_worker.adapters.engine.thread import EngineThread
from rlboost.services.rollout_worker.adapters.engine.threaded import ThreadedEngine
from rlboost.services.rollout_worker.adapters.vllm.core import VllmCore
from rlboost.services.rollout_worker.domain.request_table import NO_TOKEN, RequestTable
from rlboost.services.rollout_worker.domain.requests import Key
from rlboost.services.rollout_worker.ports import Sequences
from rlboost.shared.errors import Timeout

T = TypeVar("T")

_NO_PREFILL_LIMIT = 1 << 40
"""Tokens to admit at once: vLLM itself splits long prefixes into chunks."""
_READ_LIMIT_S = 60.0
"""Time limit to read one tensor back; a step of the engine may run first."""


class VllmEngine(ThreadedEngine):
    """`ports.Engine` over vLLM.

    Args:
        core: vLLM without weights, built on `thread`; only that thread may use it.
        thread: closed with the engine.
        slots: maximum number of running requests; vLLM's `max_num_seqs`.

    """

    def __init__(self, core: VllmCore, thread: EngineThread, *, slots: int) -> None:
        self._core = core
        self._running: dict[Key, str] = {}
        """vLLM's request id of each request that it runs."""
        self._complete = False
        """True if every tensor has been loaded and no load has failed since."""
        table = RequestTable(slots, core.max_len, core.vocabulary)
        super().__init__(thread, table, slots=slots, kv_tokens=core.kv_tokens, kv_block_tokens=core.kv_block_tokens)

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`. Each tensor is read between two steps, when the iterator advances."""
        for name in self._core.names():
            yield name, self._read(partial(self._core.read, name))

    def _read(self, call: Callable[[], T]) -> T:
        try:
            return self._thread.call(call).result(_READ_LIMIT_S)
        except concurrent.futures.TimeoutError:
            raise Timeout(f"the inference engine did not read its weights back in {_READ_LIMIT_S:.0f} s") from None

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        may_be_partial, self._complete = self._complete, False
        if not keep_kv:
            self._clear_kv()
        try:
            self._core.load(tensors, may_be_partial=may_be_partial)
            self._complete = True
        finally:
            if not self._complete:
                self._clear_kv()
            with self._thread.lock:
                self._table.begin_version(version if self._complete else -1)

    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        self._core.wake()
        return self._core.score(sequences, temperature)

    def _clear_kv(self) -> None:
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

    def _shut_down(self) -> None:
        self._core.close()

    def _round(self) -> None:
        with self._thread.lock:
            self._table.remove_aborted()
            decode = self._can_decode()
            if decode:
                self._table.admit(_NO_PREFILL_LIMIT)
        self._abort_ended()
        if not decode or not self._table.n:
            return
        self._add_new()
        generated = {token.request_id: token for token in self._core.step()}
        tokens = np.full(self._table.n, NO_TOKEN, np.int64)
        logprobs = np.zeros(self._table.n, np.float32)
        for slot, request in enumerate(self._table.requests):
            if (new := generated.get(self._running[request.key])) is not None:
                tokens[slot], logprobs[slot] = new.token, new.logprob
        with self._thread.lock:
            self._table.commit(tokens, logprobs)
        self._abort_ended()

    def _abort_ended(self) -> None:
        """Abort in vLLM the requests that are not in the table any more."""
        ended = self._running.keys() - {request.key for request in self._table.requests}
        self._core.abort([self._running.pop(key) for key in ended])

    def _add_new(self) -> None:
        """Add to vLLM the requests that it does not run."""
        for slot, request in enumerate(self._table.requests):
            if request.key not in self._running:
                completion = self._table.tokens(slot)[len(request.prompt) :].tolist()
                self._running[request.key] = self._core.add(request, completion)
