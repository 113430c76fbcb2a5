"""The built-in engine: continuous batching over any full-attention Hugging Face causal LM, on a CPU or a CUDA device.

One thread, `torch-engine`, owns the model, the cache and the rows' progress. It runs in rounds: at the boundary between
two decode steps it does what the event loop asked for (load, suspend, end aborted rows), then it admits and prefills
what fits, then it decodes one token for every row.

A prefix is everything but a row's newest token. Prefill only fills the cache with it; the newest token goes through the
model in the next decode step like everybody else's, so there is one place where tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from services.rollout_worker.adapters import torch_model
from services.rollout_worker.adapters.engine_thread import EngineThread
from services.rollout_worker.adapters.rows import Rows
from services.rollout_worker.adapters.threaded_engine import ThreadedEngine
from services.rollout_worker.adapters.torch_cache import SlotCache
from services.rollout_worker.adapters.torch_sampling import draw
from services.rollout_worker.domain.uniforms import uniforms
from shared.errors import ConfigError

_PREFILL_TOKENS = 4096
"""Tokens, padding included, that one prefill pass takes at most, unless a single prefix is longer: it bounds both the
memory of a pass and how long running rows wait for new ones."""
_ADMIT_STEPS = 4
"""Decode steps between two admissions while most slots are busy: a prefill pass for one row costs nearly as much as for
ten, and idle slots cost little."""
_SORT_STEPS = 16
"""Decode steps between two looks at whether sorting the rows by length would pay."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine(ThreadedEngine):
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
        self._device = _usable_device(device)
        self._model = torch_model.build(directory, DTYPES[dtype], self._device)
        self._weights = torch_model.Weights(self._model)
        max_len = torch_model.max_length(self._model)
        self._cache = SlotCache(slots, max_len, DTYPES[dtype], self._device)
        self._cache_is_stale = False
        self._steps = 0
        rows = Rows(slots, max_len, self._model.get_input_embeddings().num_embeddings)
        super().__init__(EngineThread("torch-engine"), rows, slots=slots)

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`."""
        return iter(self._weights)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        if not keep_kv:
            self._cache_is_stale = True
        try:
            self._weights.load(tensors)
        finally:
            with self._thread.lock:
                self._rows.begin_version(version if self._weights.complete else -1)

    def _forget_kv(self) -> None:
        self._cache_is_stale = True
        self._cache.clear()

    def _end(self) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def _round(self) -> None:
        with self._thread.lock:
            moves = self._rows.retire_aborted()
            ready = self._can_decode()
        self._cache.move(moves)
        if ready:
            self._make_tokens()

    def _make_tokens(self) -> None:
        with self._thread.lock:
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
            with self._thread.lock:
                self._rows.reorder(order)
            self._cache.reorder(order)

    def _decode(self) -> None:
        rows, positions = self._rows, self._rows.positions
        self._cache.begin_decode(positions)
        newest, at = (torch.from_numpy(a).to(self._device) for a in (rows.newest, positions))
        logits = torch_model.decode(self._model, newest, at, self._cache)
        drawn = draw(logits, rows.temperature, rows.top_p, uniforms(rows.seeds, rows.offsets))
        tokens, logprobs = (tensor.cpu().numpy() for tensor in drawn)
        with self._thread.lock:
            moves = rows.commit(tokens, logprobs)
        self._cache.move(moves)
        if not np.isfinite(logprobs).all():
            # It may have reached the cache, where even a masked column would spoil the slot's next owner.
            self._cache_is_stale = True


def _usable_device(name: str) -> torch.device:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"engine device {name!r} cannot be used: {error}") from error
    return torch.device(name)
