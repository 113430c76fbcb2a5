"""A KV cache of dense slots, with its attention as an attention implementation of transformers.

Only a model's attention layers must know about continuous batching. transformers lets a program register an attention
function under a name and passes it the keyword arguments of the model's call, as its own continuous batching does. The
model's code stays unchanged: the engine calls `model(..., slot_cache=cache)`, and each attention layer calls
`SlotCache.attend`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from rlboost.services.rollout_worker.domain.load import QUANTUM, KvCapacity, round_up
from rlboost.services.rollout_worker.domain.request_table import SlotMoves
from rlboost.shared.errors import UnsuitableWeights

ATTENTION = "rlboost_slots"
"""The name under which transformers knows the attention function."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Keyword arguments of some model families' attention that this one does not support."""

Ints = npt.NDArray[np.int64]


class _WritePositions:
    """Where a pass writes its keys and values: entry i to column `columns[i]` of slot `slots[i]`.

    Args:
        slots: [entries].
        columns: [entries].
        device: the cache's.
        selected: [entries], indices of the entries among the batch's tokens, slot by slot; None = all tokens.

    """

    def __init__(self, slots: Ints, columns: Ints, device: torch.device, selected: Ints | None = None) -> None:
        self._slots = torch.from_numpy(slots).to(device)
        self._columns = torch.from_numpy(columns).to(device)
        self._selected = None if selected is None else torch.from_numpy(selected).to(device)
        self._lines: dict[int, torch.Tensor] = {}

    def write(self, new: torch.Tensor, cached: torch.Tensor) -> None:
        """Copy [batch, kv heads, tokens, head dim] into a layer's tensor [slots, kv heads, columns, head dim]."""
        _, kv_heads, columns, size = cached.shape
        if kv_heads not in self._lines:  # of the tensor viewed as [slots * kv heads * columns, head dim]
            heads = torch.arange(kv_heads, device=cached.device)
            lines = (self._slots[:, None] * kv_heads + heads) * columns + self._columns[:, None]
            self._lines[kv_heads] = lines.view(-1)
        entries = new.transpose(1, 2).reshape(-1, kv_heads * size)
        if self._selected is not None:
            entries = entries[self._selected]
        cached.view(-1, size).index_copy_(0, self._lines[kv_heads], entries.reshape(-1, size))


class _Context:
    """Attention of a pass over several tokens of slots with cached ones: each attends to its slot up to its position.

    Args:
        slots: [batch].
        positions: [batch, tokens], on the cache's device.
        span: number of columns to attend to; more than the largest position.
        dtype: dtype of the mask.

    """

    def __init__(self, slots: Ints, positions: torch.Tensor, span: int, dtype: torch.dtype) -> None:
        in_order = np.array_equal(slots, np.arange(len(slots)))
        self._slots = slice(len(slots)) if in_order else torch.from_numpy(slots).to(positions.device)
        self._span = span
        columns = torch.arange(span, device=positions.device)
        self._mask = torch.zeros(len(slots), 1, positions.shape[1], span, dtype=dtype, device=positions.device)
        self._mask.masked_fill_(columns > positions[:, None, :, None], -torch.inf)
        self._masks: dict[int, torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the output [batch, tokens, heads, head dim] of a query [batch, heads, tokens, head dim]."""
        (batch, heads, tokens, size), kv_heads = query.shape, keys.shape[1]
        group = heads // kv_heads
        if group not in self._masks:
            self._masks[group] = self._mask.repeat(1, 1, group, 1)
        attended = functional.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, group * tokens, size),  # see `SlotCache.attend`
            keys[self._slots, :, : self._span],
            values[self._slots, :, : self._span],
            attn_mask=self._masks[group],
            scale=scale,
        )
        return attended.reshape(batch, heads, tokens, values.shape[3]).transpose(1, 2)


class _Packed:
    """Attention of a pass over several tokens of each of the slots 0..n-1, one slot after the other without padding.

    Args:
        positions: [n, longest], of the slots' tokens, right-padded.
        packed: [tokens], where the tokens of the pass are in the flat `positions`.
        span: see `_Context`.
        dtype: see `_Context`.
        one_by_one: attend with the same kernels as a decode pass, which are others for longer queries and round
            differently; reads the cache `longest` times.

    """

    def __init__(
        self, positions: torch.Tensor, packed: Ints, span: int, dtype: torch.dtype, *, one_by_one: bool
    ) -> None:
        self._shape = n, longest = positions.shape
        self._packed = torch.from_numpy(packed).to(positions.device)
        self._width = 1 if one_by_one else longest
        slots, parts = np.arange(n), positions.split(self._width, dim=1)
        self._contexts = [_Context(slots, part, span, dtype) for part in parts]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the output [1, tokens, heads, head dim] of a query [1, heads, tokens, head dim]."""
        _, heads, _, size = query.shape
        padded = query.new_zeros(*self._shape, heads, size)
        padded.view(-1, heads, size)[self._packed] = query[0].transpose(0, 1)
        parts = padded.transpose(1, 2).split(self._width, dim=2)
        attended = [
            context.attend(part, keys, values, scale) for context, part in zip(self._contexts, parts, strict=True)
        ]
        return torch.cat(attended, dim=1).flatten(0, 1)[None, self._packed]


class _ByRow:
    """Attention of a pass over any tokens, each by itself: its output depends on no other, nor on their number.

    Args:
        slots: [tokens], the slot of each.
        positions: [tokens], the position of each in its slot.
        dtype: dtype of the mask.
        device: the cache's.

    """

    def __init__(self, slots: Ints, positions: Ints, dtype: torch.dtype, device: torch.device) -> None:
        spans = (positions // QUANTUM + 1) * QUANTUM
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Of tokens that attend to as many columns: their places in the pass, slots and mask."""
        for span in np.unique(spans):
            rows = np.flatnonzero(spans == span)
            hidden = np.arange(span) > positions[rows, None]
            mask = torch.zeros(len(rows), 1, 1, int(span), dtype=dtype, device=device)
            mask.masked_fill_(torch.from_numpy(hidden).to(device)[:, None, None], -torch.inf)
            of_slots = torch.from_numpy(slots[rows]).to(device)
            self._parts.append((torch.from_numpy(rows).to(device), of_slots, mask))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the output [1, tokens, heads, head dim] of a query [1, heads, tokens, head dim]."""
        (_, heads, tokens, size), kv_heads = query.shape, keys.shape[1]
        grouped = query[0].transpose(0, 1).reshape(tokens, kv_heads, heads // kv_heads, size)
        attended = query.new_empty(tokens, kv_heads, heads // kv_heads, values.shape[3])
        for rows, slots, mask in self._parts:
            span = mask.shape[3]
            attended[rows] = functional.scaled_dot_product_attention(
                grouped[rows], keys[slots, :, :span], values[slots, :, :span], attn_mask=mask, scale=scale
            )
        return attended.reshape(1, tokens, heads, values.shape[3])


class SlotCache:
    """Keys and values of all slots, [slots, kv heads, columns, head dim] per layer; column p holds position p.

    `fit` enlarges the cache, within its capacity, for the next passes and copies; `begin_prefill`, `begin_decode` or
    `begin_verify` announces each pass. Values after a slot's end are finite and never attended to.

    On a CPU a decode step attends in blocks of slots, each up to the longest of its own slots; sorting slots by length
    makes the blocks tight. On a GPU one wide call is cheaper than many tight ones.
    """

    def __init__(self, capacity: KvCapacity, dtype: torch.dtype, device: torch.device) -> None:
        self._capacity = capacity
        self._dtype = dtype
        self._device = device
        self._block_slots = 16 if device.type == "cpu" else capacity.slots
        self._shape = (0, 0)
        """Allocated slots and columns."""
        self._filled = 0
        """Number of columns in use."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._writes = _WritePositions(np.empty(0, np.int64), np.empty(0, np.int64), device)
        self._prefills = False
        self._context: _Context | _Packed | _ByRow | None = None
        self._blocks: list[tuple[slice, int, torch.Tensor]] = []

    @property
    def token_bytes(self) -> int:
        """Size of one token's keys and values, in the layers that a pass has gone through."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self._layers.values() for t in pair)

    @property
    def tokens(self) -> int:
        """Allocated capacity in tokens; may be read from any thread."""
        slots, columns = self._shape
        return slots * columns

    def fit(self, positions: Ints, held: int) -> None:
        """Allocate for slots whose next tokens have these positions [n], which must fit the capacity.

        The contents of the first `held` slots are preserved.
        """
        columns = int(positions.max()) + 1
        if len(positions) > self._shape[0] or columns > self._shape[1]:
            self._shape = self._capacity.shape(len(positions), columns)
            n_preserved = int(positions[:held].max(initial=0))
            for layer, (keys, values) in self._layers.items():
                self._layers[layer] = self._moved(keys, held, n_preserved), self._moved(values, held, n_preserved)
        self._filled = columns

    def _moved(self, old: torch.Tensor, slots: int, columns: int) -> torch.Tensor:
        new, columns = self._zeros(old), min(columns, old.shape[2])
        new[:slots, :, :columns] = old[:slots, :, :columns]
        return new

    def begin_prefill(self, slots: Ints, starts: Ints, lengths: Ints) -> torch.Tensor:
        """Announce a prefill pass over tokens [batch, longest of `lengths`], right-padded; return their positions.

        Args:
            slots: [batch].
            starts: [batch], the position of each slot's first token; earlier ones are cached.
            lengths: [batch], the number of tokens of each slot.

        """
        offsets = np.arange(lengths.max())
        real = offsets < lengths[:, None]
        # Padding repeats the slot's last position: further columns may not exist.
        at = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        self._writes = _WritePositions(np.repeat(slots, lengths), at[real], self._device, np.flatnonzero(real))
        positions = torch.from_numpy(at).to(self._device)
        self._prefills = True
        self._context = _Context(slots, positions, round_up(int(at.max()) + 1), self._dtype) if starts.any() else None
        return positions

    def begin_decode(self, positions: Ints) -> None:
        """Announce a decode pass over one token of each of the slots 0..n-1, at these positions [n]."""
        self._prefills, self._context = False, None
        self._writes = _WritePositions(np.arange(len(positions)), positions, self._device)
        spans = self._spans(positions)
        columns = torch.arange(int(spans.max()), device=self._device)
        mask = torch.zeros(len(positions), 1, 1, len(columns), dtype=self._dtype, device=self._device)
        mask.masked_fill_(columns > torch.from_numpy(positions).to(self._device)[:, None, None, None], -torch.inf)
        # Merge neighboring blocks of the same span.
        self._blocks = []
        first = 0
        for span, blocks in groupby(spans.tolist()):
            slots = slice(first, min(first + self._block_slots * len(list(blocks)), len(positions)))
            self._blocks.append((slots, span, mask[slots, ..., :span]))
            first = slots.stop

    def begin_verify(self, starts: Ints, lengths: Ints) -> torch.Tensor:
        """Announce a pass over the next tokens of the slots 0..n-1, one slot after the other without padding.

        Args:
            starts: [n], the position of each slot's first token; earlier ones are cached.
            lengths: [n], the number of tokens of each slot.

        Returns:
            The positions of all tokens, [1, tokens].

        """
        offsets = np.arange(lengths.max())
        padded = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        packed = np.flatnonzero(offsets < lengths[:, None])
        at = padded.reshape(-1)[packed]
        self._writes = _WritePositions(packed // len(offsets), at, self._device)
        positions, span = torch.from_numpy(padded).to(self._device), round_up(int(at.max()) + 1)
        # In half precision another rounding would change which token is drawn in one of some thousand draws.
        one_by_one = self._dtype != torch.float32 and self._device.type == "cpu"
        self._context = _Packed(positions, packed, span, self._dtype, one_by_one=one_by_one)
        return torch.from_numpy(at).to(self._device)[None]

    def begin_rows(self, slots: Ints, positions: Ints) -> torch.Tensor:
        """Announce a pass over any tokens [tokens], each after those before it in its slot; see `_ByRow`.

        A token with a slot of -1 is padding: it is not cached, and its output is meaningless.

        Returns:
            The positions of all tokens, [1, tokens].

        """
        real = np.flatnonzero(slots >= 0)
        self._writes = _WritePositions(slots[real], positions[real], self._device, real)
        self._context = _ByRow(np.maximum(slots, 0), positions, self._dtype, self._device)
        return torch.from_numpy(positions).to(self._device)[None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store keys and values [batch, kv heads, tokens, head dim] and return the attention's output.

        The query has the shape [batch, heads, tokens, head dim], the output [batch, tokens, heads, head dim].
        """
        if layer not in self._layers:
            self._layers[layer] = (self._zeros(key), self._zeros(value))
        keys, values = self._layers[layer]
        self._writes.write(key, keys)
        self._writes.write(value, values)
        if self._context is not None:
            return self._context.attend(query, keys, values, scale)
        n, heads = query.shape[:2]
        kv_heads = key.shape[1]
        if self._prefills:
            # Not `enable_gqa`: most kernels do not support it, and the fallback materializes all scores.
            key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            return attended.transpose(1, 2)
        # Query heads that share a kv head are laid out as tokens of a longer query: nothing is repeated.
        query = query.reshape(n, kv_heads, heads // kv_heads, query.shape[3])
        parts = [
            functional.scaled_dot_product_attention(
                query[slots], keys[slots, :, :span], values[slots, :, :span], attn_mask=mask, scale=scale
            )
            for slots, span, mask in self._blocks
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.reshape(n, 1, heads, values.shape[3])

    def move(self, moves: SlotMoves) -> None:
        """Copy slots as the request table has moved them."""
        if moves:
            self._copy(moves.targets, moves.sources, self._filled)

    def share(self, targets: Ints, sources: Ints, columns: int) -> None:
        """Copy the first columns of slots to others; no slot is in both."""
        self._copy(targets, sources, columns)

    def order(self, positions: Ints) -> Ints | None:
        """Return an order of the slots that saves more in decode steps than copying costs; None if there is none."""
        order = np.argsort(-positions, kind="stable")
        now, sorted_ = (int(self._spans(p).sum()) for p in (positions, positions[order]))
        return order if now > 1.25 * sorted_ else None

    def reorder(self, order: Ints) -> None:
        """Reorder the slots 0..n-1: slot i gets the contents of slot `order[i]`."""
        self._copy(np.arange(len(order)), order, self._filled)

    def clear(self) -> None:
        """Drop all contents and free the memory."""
        self._layers.clear()
        self._blocks.clear()
        self._shape, self._filled = (0, 0), 0

    def _spans(self, positions: Ints) -> Ints:
        """Return the number of columns that each block attends to."""
        starts = np.arange(0, len(positions), self._block_slots)
        longest: Ints = np.maximum.reduceat(positions, starts)
        return (longest // QUANTUM + 1) * QUANTUM

    def _copy(self, targets: Ints, sources: Ints, columns: int) -> None:
        to, of = (torch.from_numpy(slots).to(self._device) for slots in (targets, sources))
        for pair in self._layers.values():
            for tensor in pair:
                tensor[to, :, :columns] = tensor[of, :, :columns]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty cache; zeros, because NaN affects attention even where it is masked."""
        slots, columns = self._shape
        return like.new_zeros(slots, like.shape[1], columns, like.shape[3])


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
        reason = f"uses {', '.join(unsupported)}" if unsupported else "does not pass on the engine's cache"
        raise UnsuitableWeights(
            f"the torch engine does not support this model: {type(module).__name__} {reason}; use the vllm engine"
        )
    layer: Any = module.layer_idx
    return slot_cache.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)


# --- The default size of a cache --------------------------------------------------------------------------------------

_CPU_KV_CACHE_BYTES = 1 << 30
"""Default size of the KV cache on a CPU; only what is needed gets allocated."""
_GPU_KV_CACHE_FRACTION = 0.7
"""Default size on a GPU, as a fraction of the memory that the weights leave free; the passes need the rest."""


def default_kv_cache_bytes(device: torch.device, utilization: float) -> int:
    """Return the default size of the KV cache on a device; see `gpu_kv_cache_bytes`."""
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


def tokens_in(kv_cache_bytes: int, token_bytes: int) -> int:
    """Return the capacity of a cache in tokens.

    Raises:
        UnsuitableWeights: it has no room for a sequence.

    """
    tokens = kv_cache_bytes // token_bytes
    if tokens < QUANTUM:
        raise UnsuitableWeights(
            f"a KV cache of {kv_cache_bytes} bytes is too small: {QUANTUM} tokens of this model need "
            f"{QUANTUM * token_bytes}; raise RLBOOST_WORKER_KV_CACHE_BYTES"
        )
    return tokens
