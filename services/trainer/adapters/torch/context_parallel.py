"""Context parallelism by exchanges around attention (DeepSpeed Ulysses, arXiv 2309.14509).

Each rank of a group computes a slice of the tokens of a micro-batch. For attention the ranks exchange tokens for heads:
each gets all tokens of its slice of the heads, and gives its results back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.torch.batch import Array


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
        """Return the column of the whole group, [n]; gradients reach this rank's shard, at `where`."""
        whole = shard.new_zeros(n)
        whole[where] = shard.detach()
        distributed.all_reduce(whole, group=self._group)
        return torch.cat([whole[: where.start], shard, whole[where.stop :]])

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
