"""Converts between published bytes and torch tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch

from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.manifest import TensorEntry, digest_of


def tensors(pulled: PulledVersion, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, or those with these names, on the CPU in its published dtype, each with its own memory."""
    for whole, data in pulled.tensors(names):
        dtype = getattr(torch, whole.dtype)
        # torch.frombuffer rejects an empty buffer.
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        yield whole.name, flat.view(whole.shape)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return W + scaling * B @ A, computed in float32 and rounded once to the dtype of W."""
    return (weight.float() + (b.float() @ a.float()) * scaling).to(weight.dtype)


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes, row major."""
    return (
        digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else digest_of(b"")
    )


def differing(published: Mapping[str, Sequence[TensorEntry]], loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that `loaded` lacks or has with other bits, in the published dtype.

    Args:
        published: name -> the shards of the tensor. Each is compared with its published digest.
        loaded: tensors by name; others are ignored.

    """
    intact = {
        name
        for name, tensor in loaded
        if name in published and all(_digest_of_shard(tensor, entry) == entry.digest for entry in published[name])
    }
    return sorted(published.keys() - intact)


def _digest_of_shard(tensor: torch.Tensor, entry: TensorEntry) -> str:
    if tuple(tensor.shape) != entry.global_shape:
        return f"another shape: {tuple(tensor.shape)}"
    region = tuple(slice(low, low + size) for low, size in zip(entry.offset, entry.local_shape, strict=True))
    return digest(tensor[region].detach().to(getattr(torch, entry.dtype)).cpu())
