"""A KV cache of dense slots, and the attention over it, as an attention implementation of transformers.

A model's attention layers are the only part of it that must know about continuous batching. transformers lets a program
register an attention function under a name and hands it the keyword arguments of the model's call; its own continuous
batching works that way. So the model's code stays the library's: the engine calls `model(..., slot_cache=cache)`, and
each attention layer ends up in `SlotCache.attend`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from services.rollout_worker.adapters.rows import Moves
from shared.errors import ConfigError

ATTENTION = "rlboost_slots"
"""The name under which transformers knows the attention function."""

_QUANTUM = 16
"""Attended lengths are rounded up to this: kernels want aligned masks, and neighbouring blocks often come out equal."""
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some families' layers pass to their attention and this one does not do."""

Ints = npt.NDArray[np.int64]


class SlotCache:
    """Keys and values of all rows, [slots, kv heads, columns, head dim] per layer; column p holds position p.

    Each forward pass is announced first: `begin_prefill` or `begin_decode`. Columns are allocated as rows grow, up to
    `max_len`. What lies behind a row's end is finite and never attended to.

    On a CPU a decode step attends block by block of rows, each to the longest of its own rows only; rows sorted by
    length make the blocks tight. On an accelerator one wide call is cheaper than many tight ones.
    """

    def __init__(self, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = slots
        self._max_columns = _round_up(max_len)
        self._dtype = dtype
        self._device = device
        self._block_rows = 16 if device.type == "cpu" else slots
        self._columns = 0
        self._filled = 0
        """No row has anything behind this column."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prefill: tuple[torch.Tensor, torch.Tensor] | None = None
        self._positions = torch.empty(0, dtype=torch.int64, device=device)
        self._blocks: list[tuple[slice, int, torch.Tensor]] = []
        self._written: dict[int, torch.Tensor] = {}

    def begin_prefill(self, rows: Ints, sources: Ints, length: int) -> None:
        """Announce a pass over whole prefixes, right-padded to `length`: row `rows[i]` is `sources[i]` of the batch."""
        self._reserve(length)
        self._filled = max(self._filled, length)
        self._prefill = (torch.from_numpy(rows).to(self._device), torch.from_numpy(sources).to(self._device))

    def begin_decode(self, positions: Ints) -> None:
        """Announce a pass over one token of each of the rows 0..n-1, at these positions."""
        self._prefill = None
        self._reserve(int(positions.max()) + 1)
        self._positions = torch.from_numpy(positions).to(self._device)
        self._written.clear()
        spans = self._spans(positions)
        self._filled = int(spans.max())
        columns = torch.arange(self._filled, device=self._device)
        mask = torch.zeros(len(positions), 1, 1, len(columns), dtype=self._dtype, device=self._device)
        mask.masked_fill_(columns > self._positions[:, None, None, None], -torch.inf)
        # Neighbouring blocks of the same span are one.
        self._blocks = []
        first = 0
        for span, blocks in groupby(spans.tolist()):
            rows = slice(first, min(first + self._block_rows * len(list(blocks)), len(positions)))
            self._blocks.append((rows, span, mask[rows, ..., :span]))
            first = rows.stop

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store keys and values [batch, kv heads, tokens, head dim] and return the attention's output.

        The query has the shape [batch, heads, tokens, head dim], the output [batch, tokens, heads, head dim].
        """
        if layer not in self._layers:
            self._layers[layer] = (self._zeros(key, self._columns), self._zeros(value, self._columns))
        keys, values = self._layers[layer]
        if self._prefill is not None:
            rows, sources = self._prefill
            keys[rows, :, : key.shape[2]] = key[sources]
            values[rows, :, : value.shape[2]] = value[sources]
            grouped = query.shape[1] != key.shape[1]
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
            )
            return attended.transpose(1, 2)
        n, heads = query.shape[:2]
        kv_heads = key.shape[1]
        written = self._targets(kv_heads)
        keys.view(-1, keys.shape[3]).index_copy_(0, written, key.reshape(-1, keys.shape[3]))
        values.view(-1, values.shape[3]).index_copy_(0, written, value.reshape(-1, values.shape[3]))
        # The query heads that share a kv head stand where a longer query's tokens would: nothing is repeated.
        query = query.reshape(n, kv_heads, heads // kv_heads, query.shape[3])
        parts = [
            functional.scaled_dot_product_attention(
                query[rows], keys[rows, :, :span], values[rows, :, :span], attn_mask=mask, scale=scale
            )
            for rows, span, mask in self._blocks
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.reshape(n, 1, heads, values.shape[3])

    def move(self, moves: Moves) -> None:
        """Repeat the copies that keep the rows dense."""
        if moves:
            self._copy(moves.targets, moves.sources)

    def order(self, positions: Ints) -> Ints | None:
        """Return the order of the rows that would save decode steps enough to be worth the copying, if there is one."""
        order = np.argsort(-positions, kind="stable")
        now, sorted_ = (int(self._spans(p).sum()) for p in (positions, positions[order]))
        return order if now > 1.25 * sorted_ else None

    def reorder(self, order: Ints) -> None:
        """Put the rows 0..n-1 into the given order."""
        self._copy(np.arange(len(order)), order)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._layers.clear()
        self._blocks.clear()
        self._columns = self._filled = 0

    def _spans(self, positions: Ints) -> Ints:
        """Return how many columns each block attends to."""
        starts = np.arange(0, len(positions), self._block_rows)
        longest: Ints = np.maximum.reduceat(positions, starts)
        return (longest // _QUANTUM + 1) * _QUANTUM

    def _copy(self, targets: Ints, sources: Ints) -> None:
        to, of = (torch.from_numpy(rows).to(self._device) for rows in (targets, sources))
        for pair in self._layers.values():
            for tensor in pair:
                tensor[to, :, : self._filled] = tensor[of, :, : self._filled]

    def _targets(self, kv_heads: int) -> torch.Tensor:
        """Return where this step's keys go in a layer's tensor, seen as [slots * kv heads * columns, head dim]."""
        if kv_heads not in self._written:
            n = len(self._positions)
            lines = torch.arange(n * kv_heads, device=self._device).view(n, kv_heads)
            self._written[kv_heads] = (lines * self._columns + self._positions[:, None]).view(-1)
        return self._written[kv_heads]

    def _reserve(self, columns: int) -> None:
        if columns <= self._columns:
            return
        before = self._columns
        self._columns = min(max(_round_up(columns), 2 * before), self._max_columns)
        for layer, pair in self._layers.items():
            grown = tuple(self._zeros(tensor, self._columns) for tensor in pair)
            for new, old in zip(grown, pair, strict=True):
                new[:, :, :before] = old
            self._layers[layer] = (grown[0], grown[1])

    def _zeros(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        """Return an empty cache; zeros, because masked garbage that is not a number would spoil what is attended."""
        return like.new_zeros(self._slots, like.shape[1], columns, like.shape[3])


def _round_up(length: int) -> int:
    return -(-length // _QUANTUM) * _QUANTUM


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_cache: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if unsupported or slot_cache is None:
        why = f"uses {', '.join(unsupported)}" if unsupported else "is not given the engine's cache"
        raise ConfigError(f"the torch engine cannot run this model: {type(module).__name__} {why}; use the vllm engine")
    layer: Any = module.layer_idx
    return slot_cache.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
