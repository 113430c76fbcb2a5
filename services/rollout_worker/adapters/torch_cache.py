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
from services.rollout_worker.domain.kv_room import Room
from shared.errors import ConfigError
from shared.kv_rows import QUANTUM, round_up

ATTENTION = "rlboost_slots"
"""The name under which transformers knows the attention function."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some families' layers pass to their attention and this one does not do."""

Ints = npt.NDArray[np.int64]


class _Places:
    """Where the keys and values of a pass go: entry i to row `rows[i]`, column `columns[i]`.

    Args:
        rows: [entries].
        columns: [entries].
        device: the cache's.
        taken: [entries], which of the batch's tokens, row by row, the entries are; None = they are all of them.

    """

    def __init__(self, rows: Ints, columns: Ints, device: torch.device, taken: Ints | None = None) -> None:
        self._rows = torch.from_numpy(rows).to(device)
        self._columns = torch.from_numpy(columns).to(device)
        self._taken = None if taken is None else torch.from_numpy(taken).to(device)
        self._lines: dict[int, torch.Tensor] = {}

    def write(self, new: torch.Tensor, cached: torch.Tensor) -> None:
        """Copy [batch, kv heads, tokens, head dim] into a layer's tensor [rows, kv heads, columns, head dim]."""
        _, kv_heads, columns, size = cached.shape
        if kv_heads not in self._lines:  # of the tensor seen as [rows * kv heads * columns, head dim]
            heads = torch.arange(kv_heads, device=cached.device)
            lines = (self._rows[:, None] * kv_heads + heads) * columns + self._columns[:, None]
            self._lines[kv_heads] = lines.view(-1)
        entries = new.transpose(1, 2).reshape(-1, kv_heads * size)
        if self._taken is not None:
            entries = entries[self._taken]
        cached.view(-1, size).index_copy_(0, self._lines[kv_heads], entries.reshape(-1, size))


class _Context:
    """What a pass over tokens that are not their rows' first ones attends to: each row as far as the token's position.

    Args:
        rows: [batch].
        positions: [batch, tokens], on the cache's device.
        span: more than the largest position.
        dtype: of the mask.

    """

    def __init__(self, rows: Ints, positions: torch.Tensor, span: int, dtype: torch.dtype) -> None:
        self._rows = torch.from_numpy(rows).to(positions.device)
        self._span = span
        columns = torch.arange(span, device=positions.device)
        self._mask = torch.zeros(len(rows), 1, positions.shape[1], span, dtype=dtype, device=positions.device)
        self._mask.masked_fill_(columns > positions[:, None, :, None], -torch.inf)
        self._masks: dict[int, torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the output [batch, heads, tokens, head dim]."""
        (batch, heads, tokens, size), kv_heads = query.shape, keys.shape[1]
        group = heads // kv_heads
        if group not in self._masks:
            self._masks[group] = self._mask.repeat(1, 1, group, 1)
        attended = functional.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, group * tokens, size),  # see `SlotCache.attend`
            keys[self._rows, :, : self._span],
            values[self._rows, :, : self._span],
            attn_mask=self._masks[group],
            scale=scale,
        )
        return attended.reshape(batch, heads, tokens, values.shape[3])


class SlotCache:
    """Keys and values of all rows, [rows, kv heads, columns, head dim] per layer; column p holds position p.

    `fit` makes the rectangle large enough, within `room`, for what comes next: passes, each of which is announced by
    `begin_prefill` or `begin_decode`, and copies. What lies behind a row's end is finite and never attended to.

    On a CPU a decode step attends block by block of rows, each to the longest of its own rows only; rows sorted by
    length make the blocks tight. On an accelerator one wide call is cheaper than many tight ones.
    """

    def __init__(self, room: Room, dtype: torch.dtype, device: torch.device) -> None:
        self._room = room
        self._dtype = dtype
        self._device = device
        self._block_rows = 16 if device.type == "cpu" else room.slots
        self._shape = (0, 0)
        """Rows and columns that there are."""
        self._filled = 0
        """No row has anything behind this column."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places = _Places(np.empty(0, np.int64), np.empty(0, np.int64), device)
        self._prefills = False
        self._context: _Context | None = None
        self._blocks: list[tuple[slice, int, torch.Tensor]] = []

    @property
    def token_bytes(self) -> int:
        """What keys and values of one token take, in the layers that there has been a pass through."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self._layers.values() for t in pair)

    @property
    def tokens(self) -> int:
        """For how many tokens there is memory now; to be read from any thread."""
        rows, columns = self._shape
        return rows * columns

    def fit(self, positions: Ints, held: int) -> None:
        """Have room for rows that come to these positions [n], which must fit into `room`.

        Of the first `held` rows the cache keeps all that comes before.
        """
        columns = int(positions.max()) + 1
        if len(positions) > self._shape[0] or columns > self._shape[1]:
            self._shape = self._room.shape(len(positions), columns)
            kept = int(positions[:held].max(initial=0))
            for layer, (keys, values) in self._layers.items():
                self._layers[layer] = self._moved(keys, held, kept), self._moved(values, held, kept)
        self._filled = columns

    def _moved(self, old: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        new = self._zeros(old)
        new[:rows, :, :columns] = old[:rows, :, :columns]
        return new

    def begin_prefill(self, rows: Ints, starts: Ints, lengths: Ints) -> torch.Tensor:
        """Announce a pass over tokens [batch, longest of `lengths`], right-padded; return their positions.

        Args:
            rows: [batch], whose tokens they are.
            starts: [batch], the position of each one's first token; what comes before is in the cache.
            lengths: [batch], how many each one has.

        """
        offsets = np.arange(lengths.max())
        real = offsets < lengths[:, None]
        # The padding is at its row's last position: further ones need not exist.
        at = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        self._places = _Places(np.repeat(rows, lengths), at[real], self._device, np.flatnonzero(real))
        positions = torch.from_numpy(at).to(self._device)
        self._prefills = True
        self._context = _Context(rows, positions, round_up(int(at.max()) + 1), self._dtype) if starts.any() else None
        return positions

    def begin_decode(self, positions: Ints) -> None:
        """Announce a pass over one token of each of the rows 0..n-1, at these positions."""
        self._prefills, self._context = False, None
        self._places = _Places(np.arange(len(positions)), positions, self._device)
        spans = self._spans(positions)
        columns = torch.arange(int(spans.max()), device=self._device)
        mask = torch.zeros(len(positions), 1, 1, len(columns), dtype=self._dtype, device=self._device)
        mask.masked_fill_(columns > torch.from_numpy(positions).to(self._device)[:, None, None, None], -torch.inf)
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
            self._layers[layer] = (self._zeros(key), self._zeros(value))
        keys, values = self._layers[layer]
        self._places.write(key, keys)
        self._places.write(value, values)
        if self._context is not None:
            return self._context.attend(query, keys, values, scale).transpose(1, 2)
        n, heads = query.shape[:2]
        kv_heads = key.shape[1]
        if self._prefills:
            # Not `enable_gqa`: most kernels do not have it, and what stands in for them keeps every score in memory.
            key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            return attended.transpose(1, 2)
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
            self._copy(moves.targets, moves.sources, self._filled)

    def share(self, targets: Ints, sources: Ints, columns: int) -> None:
        """Copy the first columns of rows to others; no row is in both."""
        self._copy(targets, sources, columns)

    def order(self, positions: Ints) -> Ints | None:
        """Return the order of the rows that would save decode steps enough to be worth the copying, if there is one."""
        order = np.argsort(-positions, kind="stable")
        now, sorted_ = (int(self._spans(p).sum()) for p in (positions, positions[order]))
        return order if now > 1.25 * sorted_ else None

    def reorder(self, order: Ints) -> None:
        """Put the rows 0..n-1 into the given order."""
        self._copy(np.arange(len(order)), order, self._filled)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._layers.clear()
        self._blocks.clear()
        self._shape, self._filled = (0, 0), 0

    def _spans(self, positions: Ints) -> Ints:
        """Return how many columns each block attends to."""
        starts = np.arange(0, len(positions), self._block_rows)
        longest: Ints = np.maximum.reduceat(positions, starts)
        return (longest // QUANTUM + 1) * QUANTUM

    def _copy(self, targets: Ints, sources: Ints, columns: int) -> None:
        to, of = (torch.from_numpy(rows).to(self._device) for rows in (targets, sources))
        for pair in self._layers.values():
            for tensor in pair:
                tensor[to, :, :columns] = tensor[of, :, :columns]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty cache; zeros, because masked garbage that is not a number would spoil what is attended."""
        rows, columns = self._shape
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])


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
