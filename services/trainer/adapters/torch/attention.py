"""Attention over packed rows, which are concatenated without padding; each row attends to itself alone.

It is computed row by row, so there is no mask of the square of all tokens: on a GPU in half precision by torch's
variable-length attention, else by calls of scaled dot product attention, each for a row or for some short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional
from transformers import AttentionInterface

Array = np.ndarray[Any, Any]

# --- Context parallelism by exchanges around attention (DeepSpeed Ulysses, arXiv 2309.14509) --------------------------
# Each rank of a group computes a slice of the tokens of a micro-batch. For attention the ranks exchange tokens for
# heads: each gets all tokens of its slice of the heads, and gives its results back.


class ContextGroup:
    """The ranks that share a micro-batch. All methods but `slice_of` and `positions` are collective."""

    def __init__(self, group: Any) -> None:
        """Use a process group whose ranks get the same micro-batches."""
        self._group = group
        self._rank = distributed.get_rank(group)
        self._size = distributed.get_world_size(group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def is_first(self) -> bool:
        """True on one rank of the group."""
        return self._rank == 0

    def slice_of(self, n_tokens: int) -> slice:
        """Return this rank's slice of a number of tokens that the group divides."""
        each = n_tokens // self._size
        return slice(self._rank * each, (self._rank + 1) * each)

    def positions(self, predicts: Array, n_tokens: int) -> slice:
        """Return the slice of the ascending positions that are in this rank's slice of the tokens."""
        own = self.slice_of(n_tokens)
        first, end = np.searchsorted(predicts, [own.start, own.stop])
        return slice(int(first), int(end))

    def joined(self, shard: Tensor, where: slice, n: int) -> Tensor:
        """Return the columns of the whole group, [..., n]; gradients reach this rank's shard, at `where`."""
        whole = shard.new_zeros(*shard.shape[:-1], n)
        whole[..., where] = shard.detach()
        distributed.all_reduce(whole, group=self._group)
        return torch.cat([whole[..., : where.start], shard, whole[..., where.stop :]], -1)

    def broadcast(self, column: Tensor) -> None:
        """Overwrite a column with that of the first rank."""
        distributed.broadcast(column, group=self._group, group_src=0)

    def tokens_of_heads(self, shard: Tensor) -> Tensor:
        """Exchange [this rank's tokens, heads, size] for [all tokens, this rank's heads, size].

        Key heads are repeated if there are too few for the group.
        """
        n_heads = shard.shape[1]
        if repeats := math.lcm(n_heads, self._size) // n_heads - 1:
            shard = shard.repeat_interleave(repeats + 1, 1)
        by_rank = shard.reshape(len(shard), self._size, -1, shard.shape[-1]).transpose(0, 1)
        return _exchange(by_rank, self._group).flatten(0, 1)

    def heads_of_tokens(self, shard: Tensor) -> Tensor:
        """Exchange [all tokens, this rank's heads, size] for [this rank's tokens, heads, size]."""
        by_rank = shard.reshape(self._size, -1, *shard.shape[1:])
        return _exchange(by_rank, self._group).transpose(0, 1).flatten(1, 2)


def _exchange(shards: Tensor, group: Any) -> Tensor:
    result = _Exchange.apply(shards, group)  # type: ignore[no-untyped-call]  # torch's
    received: Tensor = result
    return received


class _Exchange(torch.autograd.Function):
    """Sends shard i to rank i; its gradient is another exchange."""

    @staticmethod
    def forward(ctx: Any, shards: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(shards, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(shards: Tensor, group: Any) -> Tensor:
    shards = shards.contiguous()
    received = torch.empty_like(shards)
    distributed.all_to_all_single(received, shards, group=group)
    return received


# --- Attention within each row ----------------------------------------------------------------------------------------


Row = TypeVar("Row")
PACKED = "rlboost_packed"
"""The name under which transformers knows this attention: a model's `attn_implementation`."""
_MAX_VARLEN_HEAD = 256
_UNUSED = {"position_ids", "use_cache"}
"""Arguments that transformers may pass with a value, and that do not change attention."""
_GROUP_TOKENS = 2048
"""Tokens, padded, of neighboring rows whose attention is one call: calls for many short rows would cost more."""


class RowLengths:
    """The number of tokens of each row. Not a tuple, for whose length torch.compile would compile layers again."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths


def packs_rows(model: Any) -> bool:
    """Return True if the attention of a transformers model is `PACKED`, see `layers.attention_of`."""
    return bool(model.config.get_text_config()._attn_implementation == PACKED)  # noqa: SLF001 - it has no public name


def one_row_each(batches: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Return the micro-batches of a model whose attention is not `PACKED`."""
    return [[row] for rows in batches for row in rows]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    window: int = 0,
) -> Tensor:
    """Return causal attention within each of several concatenated rows, [tokens, heads, value size].

    Args:
        query: [tokens, heads, head size].
        key: [tokens, key heads, head size].
        value: [tokens, key heads, value size].
        boundaries: int32, 0, then the end of each row, on the device.
        lengths: tokens of each row, for the host: reading `boundaries` would make it wait for the device.
        scale: factor of the scores; None: 1 / sqrt(head size).
        window: tokens that a token attends to, itself included; 0: all before it.

    """
    query, key, value = _in_autocast_dtype(query, key, value)
    if _has_varlen_kernel(query, value):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - imports much, and needs a GPU

        size, longest = (window - 1 if window else -1, 0), max(lengths)
        result: Any = varlen_attn(
            query,
            key,
            value,
            boundaries,
            boundaries,
            longest,
            longest,
            scale=scale,
            window_size=size,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        attended: Tensor = result
        return attended
    # Split rather than sliced: the gradient of each slice would be as large as the whole.
    groups = _group_lengths(np.asarray(lengths), window)
    n_tokens = [int(group.sum()) for group in groups]
    parts = (torch.split(part, n_tokens) for part in (query, key, value))
    return torch.cat(
        [_rows_attention(q, k, v, group, scale, window) for q, k, v, group in zip(*parts, groups, strict=True)]
    )


def _in_autocast_dtype(*tensors: Tensor) -> Iterator[Tensor]:
    """Return tensors in the dtype to which scaled dot product attention casts them under autocast."""
    device = tensors[0].device.type
    cast = torch.is_autocast_enabled(device)
    return (tensor.to(torch.get_autocast_dtype(device)) if cast else tensor for tensor in tensors)


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return True if torch's variable-length attention computes these: in half precision, from Ampere GPUs on."""
    head = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype.itemsize == 2
        and head == value.shape[-1]
        and head <= _MAX_VARLEN_HEAD
        and head % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _group_lengths(lengths: Array, window: int) -> list[Array]:
    """Return the lengths of neighboring rows that one call computes: one row, or short ones of similar length."""
    groups, first = [], 0
    for end in range(1, len(lengths) + 1):
        group = lengths[first : end + 1]
        longest = int(group.max())
        if (
            end == len(lengths)
            or len(group) * longest > _GROUP_TOKENS
            or 4 * int(group.min()) < 3 * longest
            or 0 < window < longest
        ):
            groups.append(lengths[first:end])
            first = end
    return groups


def _rows_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Array, scale: float | None, window: int
) -> Tensor:
    """Return the causal attention of rows, which are padded if there are several, [tokens, heads, value size]."""
    if len(lengths) == 1:
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        return _row_attention(q, k, v, scale=scale, window=window)[0].transpose(0, 1)
    longest = int(lengths.max())
    slots = torch.from_numpy(np.flatnonzero(np.arange(longest) < lengths[:, None])).to(query.device)
    q, k, v = (
        part.new_zeros(len(lengths) * longest, *part.shape[1:])
        .index_copy(0, slots, part)
        .reshape(len(lengths), longest, *part.shape[1:])
        .transpose(1, 2)
        for part in (query, key, value)
    )
    return select_rows(_row_attention(q, k, v, scale=scale, window=0).transpose(1, 2).flatten(0, 1), slots)


def _row_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int) -> Tensor:
    """Return the causal attention of rows of one length, [rows, heads, tokens, size].

    It is computed in blocks of the window's length if the window is shorter than the rows.
    """
    grouped = query.shape[1] != key.shape[1]
    n = query.shape[2]
    if not window or n <= window:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    outputs = []
    for low in range(0, n, window):
        first, high = max(0, low - window + 1), min(n, low + window)
        at = torch.arange(first, high, device=query.device)
        distance = at[low - first :, None] - at
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, low:high],
                key[:, :, first:high],
                value[:, :, first:high],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, 2)


def select_rows(values: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of a tensor at positions that all differ. Unlike `index_select`'s, its gradient is a copy."""
    result = _SelectedRows.apply(values, positions)  # type: ignore[no-untyped-call]  # torch's
    rows: Tensor = result
    return rows


class _SelectedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.n_rows = len(values)
        return values.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.new_zeros(ctx.n_rows, *gradient.shape[1:]).index_copy_(0, positions, gradient), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attention_forward(  # noqa: PLR0913 - transformers' signature, and what `model_inputs` adds
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    row_lengths: RowLengths | None = None,
    context: ContextGroup | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, as transformers calls it: with [1, heads, tokens, head size].

    Raises:
        ValueError: the layer needs something else than causal attention in a window, such as sinks.

    """
    if cu_seq_lens_q is None or row_lengths is None:
        raise ValueError("this attention needs cu_seq_lens_q: call the model with the arguments of model_inputs")
    others |= {"attention_mask": attention_mask}
    if unknown := sorted(k for k, v in others.items() if k not in _UNUSED and (isinstance(v, Tensor) or v)):
        raise ValueError(f"this attention does not compute {', '.join(unknown)}: take another attn_implementation")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    window = sliding_window or 0
    if context is None:
        return attention(q, k, v, cu_seq_lens_q, row_lengths.lengths, scaling, window)[None], None
    q, k, v = (context.tokens_of_heads(shard) for shard in _in_autocast_dtype(q, k, v))
    result = attention(q, k, v, cu_seq_lens_q, row_lengths.lengths, scaling, window)
    return context.heads_of_tokens(result)[None], None


AttentionInterface.register(PACKED, _attention_forward)
