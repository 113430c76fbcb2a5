"""Converts between shards, as weights are published, and torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rlboost.shared.weights.shards import Shard


def tensor_of(shard: Shard) -> Tensor:
    """Return a copy of a shard as a tensor."""
    return torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(shard.local_shape)


def whole_shard(name: str, tensor: Tensor) -> Shard:
    """Return a contiguous tensor on the CPU as a shard with all of it, which shares its memory."""
    raw, shape = tensor.reshape(-1).view(torch.uint8).numpy().data, tuple(tensor.shape)
    return Shard(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, raw)
