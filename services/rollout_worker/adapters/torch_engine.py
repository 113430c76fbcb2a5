"""The built-in engine: continuous batching over any full-attention Hugging Face causal LM, on a CPU or a CUDA device.

One thread, `torch-engine`, owns the model, the cache and the rows' progress. It runs in rounds: at the boundary between
two decode steps it does what the event loop asked for (load, suspend, end aborted rows), then it admits and prefills
what fits, then it decodes one token for every row.

A prefix is everything but a row's newest token. Prefill only fills the cache with it; the newest token goes through the
model in the next decode step like everybody else's, so there is one place where tokens are drawn. What a prefix has in
common with another row's is copied from there: a group's prompt is read in once, by whichever sample comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from services.rollout_worker.adapters import torch_model
from services.rollout_worker.adapters.engine_thread import EngineThread
from services.rollout_worker.adapters.rows import Ints, Rows
from services.rollout_worker.adapters.threaded_engine import ThreadedEngine
from services.rollout_worker.adapters.torch_cache import SlotCache
from services.rollout_worker.adapters.torch_sampling import draw
from services.rollout_worker.adapters.torch_score import score
from services.rollout_worker.domain import prefixes
from services.rollout_worker.domain.kv_room import Room
from services.rollout_worker.domain.uniforms import uniforms
from services.rollout_worker.ports import Key, Sequences
from shared.errors import ConfigError
from shared.kv_rows import QUANTUM

_PREFILL_TOKENS = 4096
"""Tokens, padding included, that one prefill pass takes at most: it bounds both the memory of a pass and how long
running rows wait for new ones. For a longer prefix a pass takes fewer, so that it has no more pairs of tokens."""
_ADMIT_STEPS = 4
"""Decode steps between two admissions while most slots are busy: a prefill pass for one row costs nearly as much as for
ten, and idle slots cost little."""
_SORT_STEPS = 16
"""Decode steps between two looks at whether sorting the rows by length would pay."""
_CPU_KV_CACHE_BYTES = 1 << 30
"""Of the KV cache where nothing else is said; it takes only what it needs of that."""
_GPU_KV_CACHE_PART = 0.7
"""Likewise, of what is free on a GPU beside the weights: the rest is for the passes' own tensors."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine(ThreadedEngine):
    """`ports.Engine` in this process.

    Args:
        directory: holds the model's `config.json`; weights come through `load_weights`.
        slots: how many requests run at once.
        device: "cpu" or a CUDA device.
        dtype: of weights, activations and cache; sampling is in float32.
        kv_cache_bytes: of the KV cache at most; while it grows one layer's part is there twice. Requests that do not
            fit beside the running ones wait. 0 = 0.7 of what is free on a GPU, or 1 GiB.

    Raises:
        ConfigError: the directory, the device, the model's architecture or so small a cache cannot be used.

    """

    def __init__(
        self,
        directory: Path,
        *,
        slots: int,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        kv_cache_bytes: int = 0,
    ) -> None:
        self._device = _usable_device(device)
        self._model = torch_model.build(directory, DTYPES[dtype], self._device)
        self._weights = torch_model.Weights(self._model)
        max_len = torch_model.max_length(self._model)
        n_bytes = kv_cache_bytes or _default_kv_cache_bytes(self._device)
        self._token_bytes = torch_model.kv_token_bytes(self._model)
        room = Room(slots, max_len, _tokens_in(n_bytes, self._token_bytes))
        self._cache = SlotCache(room, DTYPES[dtype], self._device)
        self._cache_is_stale = False
        self._older: set[Key] = set()
        """Rows with keys and values of older weights, which no other row may copy."""
        self._steps = 0
        self.tokens_read_total = 0
        """Tokens that went through the model to fill the cache; those copied from other rows are not among them."""
        rows = Rows(slots, max_len, self._model.get_input_embeddings().num_embeddings, room)
        super().__init__(EngineThread("torch-engine"), rows, slots=slots)

    @property
    def kv_cache_bytes(self) -> int:
        """What the KV cache takes now."""
        return self._cache.tokens * self._token_bytes

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`."""
        return iter(self._weights)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        if keep_kv:
            self._older = {request.key for request in self._rows.requests}
        else:
            self._cache_is_stale = True
        try:
            self._weights.load(tensors)
        finally:
            with self._thread.lock:
                self._rows.begin_version(version if self._weights.complete else -1)

    @torch.inference_mode()
    def _score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        return score(self._model, sequences, temperature)

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
            new = self._rows.admit(0 if busy and self._steps % _ADMIT_STEPS else _PREFILL_TOKENS)
            n = self._rows.n
        if self._cache_is_stale:
            self._cache.clear()
            self._older.clear()
            self._cache_is_stale, new = False, range(n)
        if n > 0:
            self._cache.fit(self._rows.positions, held=new.start)
            if new:
                self._read_in(new)
            self._sort()
            self._decode()
        self._steps += 1

    def _read_in(self, new: range) -> None:
        """Fill the cache with the prefixes of new rows, which come after all others."""
        rows = self._rows
        held = [row for row in range(new.start) if rows.requests[row].key not in self._older]
        ways = ([(row, rows.prefix(row)) for row in of] for of in (new, held))
        for turn in prefixes.plan(*ways):
            copies = [reading for reading in turn if reading.shared]
            if copies:
                pairs = np.array([(reading.row, reading.donor) for reading in copies])
                self._cache.share(pairs[:, 0], pairs[:, 1], max(reading.shared for reading in copies))
            left = [(reading.row, reading.shared, reading.length) for reading in turn]
            self._prefill(np.array(left))

    def _prefill(self, left: Ints) -> None:
        """Have the model read the tokens from `left[:, 1]` to `left[:, 2]` of the rows `left[:, 0]`."""
        while (left := left[left[:, 1] < left[:, 2]]).size:
            most = max(1, min(_PREFILL_TOKENS, _PREFILL_TOKENS**2 // int(left[:, 2].max())))
            lengths = np.minimum(left[:, 2] - left[:, 1], most)
            left = left[np.argsort(-lengths, kind="stable")]
            longest = int(lengths.max())
            batch = slice(most // longest)
            rows, starts, ends = left[batch].T
            lengths = np.minimum(ends - starts, longest)
            tokens = np.zeros((len(rows), longest), np.int64)
            for i, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
                tokens[i, :length] = self._rows.tokens(row)[start : start + length]
            positions = self._cache.begin_prefill(rows, starts, lengths)
            torch_model.prefill(self._model, torch.from_numpy(tokens).to(self._device), positions, self._cache)
            self.tokens_read_total += int(lengths.sum())
            left[batch, 1] += lengths

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


def _default_kv_cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_KV_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _GPU_KV_CACHE_PART)


def _tokens_in(kv_cache_bytes: int, token_bytes: int) -> int:
    """Return how many tokens the cache holds."""
    tokens = kv_cache_bytes // token_bytes
    if tokens < QUANTUM:
        raise ConfigError(
            f"a KV cache of {kv_cache_bytes} bytes is too small: {QUANTUM} tokens of this model need "
            f"{QUANTUM * token_bytes}; raise RLBOOST_WORKER_KV_CACHE_BYTES"
        )
    return tokens
