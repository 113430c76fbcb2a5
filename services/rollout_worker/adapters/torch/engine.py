"""The built-in engine: continuous batching over any full-attention Hugging Face causal LM, on a CPU or a CUDA device.

One thread, `torch-engine`, owns the model, the cache and the slots. It runs in rounds: between two decode steps it runs
the event loop's calls (load, suspend, abort), admits and prefills the requests that fit, then decodes one token per
slot.

A prefix is every token of a request but its last. Prefill only fills the cache with the prefix; the last token goes
through the model in the next decode step, so all tokens are sampled in one place. Keys and values that a prefix has in
common with another slot's are copied from that slot: the prompt of a group is prefilled once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rlboost.services.rollout_worker.adapters.engine.thread import EngineThread
from rlboost.services.rollout_worker.adapters.engine.threaded import ThreadedEngine
from rlboost.services.rollout_worker.adapters.torch import model as torch_model
from rlboost.services.rollout_worker.adapters.torch.routing import RoutingRecorder
from rlboost.services.rollout_worker.adapters.torch.sampling import sample
from rlboost.services.rollout_worker.adapters.torch.scoring import score
from rlboost.services.rollout_worker.adapters.torch.slot_cache import SlotCache
from rlboost.services.rollout_worker.domain import prefixes
from rlboost.services.rollout_worker.domain.kv_capacity import QUANTUM, KvCapacity
from rlboost.services.rollout_worker.domain.request_table import Ints, RequestTable
from rlboost.services.rollout_worker.domain.requests import RequestKey
from rlboost.services.rollout_worker.domain.uniforms import uniforms
from rlboost.services.rollout_worker.ports import Sequences
from rlboost.shared.errors import ConfigError

_PREFILL_TOKENS = 4096
"""Maximum tokens of one prefill pass, including padding: bounds the memory of a pass and the delay of running requests.
For a longer prefix a pass takes fewer, so that it has no more pairs of tokens."""
_ADMIT_STEPS = 4
"""Decode steps between two admissions while most slots are busy: prefilling one request costs nearly as much as ten,
and idle slots cost little."""
_SORT_STEPS = 16
"""Decode steps between two checks whether sorting the slots by length pays."""
_CPU_KV_CACHE_BYTES = 1 << 30
"""Default size of the KV cache on a CPU; only what is needed gets allocated."""
_GPU_KV_CACHE_FRACTION = 0.7
"""Default size on a GPU, as a fraction of the memory that the weights leave free; the passes need the rest."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine(ThreadedEngine):
    """`ports.Engine` in this process.

    Args:
        directory: holds the model's `config.json`; weights come through `load_weights`.
        slots: maximum number of running requests.
        device: "cpu" or a CUDA device that `require_device` has checked.
        dtype: dtype of weights, activations and cache; sampling is in float32.
        kv_cache_bytes: maximum size of the KV cache; while it grows, one layer's part is allocated twice. Requests that
            do not fit are queued. 0 = 0.7 of the free memory on a GPU, or 1 GiB on a CPU.
        gpu_memory_utilization: fraction of the GPU's memory for weights, cache and passes, if `kv_cache_bytes` is 0;
            0 = no limit but the free memory.

    Raises:
        ConfigError: the directory or the model is not supported, or the cache is too small.

    """

    def __init__(
        self,
        directory: Path,
        *,
        slots: int,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        kv_cache_bytes: int = 0,
        gpu_memory_utilization: float = 0.0,
    ) -> None:
        self._device = torch.device(device)
        self._model = torch_model.build(directory, DTYPES[dtype], self._device)
        self._weights = torch_model.Weights(self._model)
        max_len = torch_model.max_length(self._model)
        n_bytes = kv_cache_bytes or _default_kv_cache_bytes(self._device, gpu_memory_utilization)
        self._token_bytes = torch_model.kv_token_bytes(self._model)
        capacity = KvCapacity(slots, max_len, _tokens_in(n_bytes, self._token_bytes))
        self._cache = SlotCache(capacity, DTYPES[dtype], self._device)
        self._cache_is_stale = False
        self._stale_keys: set[RequestKey] = set()
        """Requests whose cache has keys and values of older weights; other slots must not copy them."""
        self._steps = 0
        self.prefilled_tokens_total = 0
        """Tokens that went through the model to fill the cache, without those copied from other slots."""
        self._routing = RoutingRecorder(self._model)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        table = RequestTable(slots, max_len, vocabulary, capacity, self._routing.shape)
        super().__init__(EngineThread("torch-engine"), table, slots=slots)

    @property
    def kv_cache_bytes(self) -> int:
        """The current size of the KV cache."""
        return self._cache.tokens * self._token_bytes

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ThreadedEngine.loaded_tensors`."""
        return iter(self._weights)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        if keep_kv:
            self._stale_keys = {request.key for request in self._table.requests}
        else:
            self._cache_is_stale = True
        try:
            self._weights.load(tensors)
        finally:
            with self._thread.lock:
                self._table.begin_version(version if self._weights.complete else -1)

    @torch.inference_mode()
    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        return score(self._model, sequences, temperature)

    def _clear_kv(self) -> None:
        self._cache_is_stale = True
        self._cache.clear()

    def _shut_down(self) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def _round(self) -> None:
        with self._thread.lock:
            moves = self._table.remove_aborted()
            ready = self._can_decode()
        self._cache.move(moves)
        if ready:
            self._generate()

    def _generate(self) -> None:
        with self._thread.lock:
            busy = 2 * self._table.n >= self.slots
            new = self._table.admit(0 if busy and self._steps % _ADMIT_STEPS else _PREFILL_TOKENS)
            n = self._table.n
        if self._cache_is_stale:
            self._cache.clear()
            self._stale_keys.clear()
            self._cache_is_stale, new = False, range(n)
        if n > 0:
            self._cache.fit(self._table.positions, held=new.start)
            if new:
                self._prefill_new(new)
            self._sort()
            self._decode()
        self._steps += 1

    def _prefill_new(self, new: range) -> None:
        """Fill the cache with the prefixes of new slots, which come after all others."""
        table = self._table
        held = [slot for slot in range(new.start) if table.requests[slot].key not in self._stale_keys]
        new_prefixes, held_prefixes = ([(slot, table.prefix(slot)) for slot in slots] for slots in (new, held))
        for turn in prefixes.plan(new_prefixes, held_prefixes):
            copies = [prefill for prefill in turn if prefill.shared]
            if copies:
                pairs = np.array([(prefill.slot, prefill.donor) for prefill in copies])
                self._cache.share(pairs[:, 0], pairs[:, 1], max(prefill.shared for prefill in copies))
                table.share_routing(pairs[:, 0], pairs[:, 1], np.array([prefill.shared for prefill in copies]))
            self._prefill(np.array([(prefill.slot, prefill.shared, prefill.length) for prefill in turn]))

    def _prefill(self, todo: Ints) -> None:
        """Run the model on the tokens from `todo[:, 1]` to `todo[:, 2]` of the slots `todo[:, 0]`."""
        while (todo := todo[todo[:, 1] < todo[:, 2]]).size:
            most = max(1, min(_PREFILL_TOKENS, _PREFILL_TOKENS**2 // int(todo[:, 2].max())))
            lengths = np.minimum(todo[:, 2] - todo[:, 1], most)
            todo = todo[np.argsort(-lengths, kind="stable")]
            longest = int(lengths.max())
            batch = slice(most // longest)
            slots, starts, ends = todo[batch].T
            lengths = np.minimum(ends - starts, longest)
            tokens = np.zeros((len(slots), longest), np.int64)
            for i, (slot, start, length) in enumerate(zip(slots, starts, lengths, strict=True)):
                tokens[i, :length] = self._table.tokens(slot)[start : start + length]
            positions = self._cache.begin_prefill(slots, starts, lengths)
            with self._routing.recording(enabled=self._table.records_routing) as experts:
                torch_model.prefill(self._model, torch.from_numpy(tokens).to(self._device), positions, self._cache)
            if self._table.records_routing:
                self._table.record_routing(slots, starts, lengths, experts(len(slots)))
            self.prefilled_tokens_total += int(lengths.sum())
            todo[batch, 1] += lengths

    def _sort(self) -> None:
        if self._steps % _SORT_STEPS == 0 and (order := self._cache.order(self._table.positions)) is not None:
            with self._thread.lock:
                self._table.reorder(order)
            self._cache.reorder(order)

    def _decode(self) -> None:
        table, positions = self._table, self._table.positions
        self._cache.begin_decode(positions)
        last_tokens, at = (torch.from_numpy(a).to(self._device) for a in (table.last_tokens, positions))
        with self._routing.recording(enabled=table.records_routing) as experts:
            logits = torch_model.decode(self._model, last_tokens, at, self._cache)
        if table.records_routing:
            n = len(positions)
            table.record_routing(np.arange(n), positions, np.ones(n, np.int64), experts(n))
        sampled = sample(logits, table.temperature, table.top_p, uniforms(table.seeds, table.offsets))
        tokens, logprobs = (tensor.cpu().numpy() for tensor in sampled)
        with self._thread.lock:
            moves = table.commit(tokens, logprobs)
        self._cache.move(moves)
        if not np.isfinite(logprobs).all():
            # NaN may be in the cache, where even a masked column would affect the slot's next request.
            self._cache_is_stale = True


def _default_kv_cache_bytes(device: torch.device, utilization: float) -> int:
    if device.type != "cuda":
        return _CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return gpu_kv_cache_bytes(free, total, torch.cuda.memory_allocated(device), utilization)


def gpu_kv_cache_bytes(free: int, total: int, allocated: int, utilization: float) -> int:
    """Return the default size of the KV cache on a GPU.

    Args:
        free: bytes that no process uses.
        total: bytes of the GPU.
        allocated: bytes of the loaded weights.
        utilization: fraction of `total` for this engine, weights included; 0 = all that is free.

    """
    budget = max(0, int(total * utilization) - allocated) if utilization else free
    return int(min(free, budget) * _GPU_KV_CACHE_FRACTION)


def _tokens_in(kv_cache_bytes: int, token_bytes: int) -> int:
    """Return the capacity of the cache in tokens."""
    tokens = kv_cache_bytes // token_bytes
    if tokens < QUANTUM:
        raise ConfigError(
            f"a KV cache of {kv_cache_bytes} bytes is too small: {QUANTUM} tokens of this model need "
            f"{QUANTUM * token_bytes}; raise RLBOOST_WORKER_KV_CACHE_BYTES"
        )
    return tokens
