"""Between the bytes of published weights and torch tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from shared.weights.manifest import Manifest, TensorEntry, digest_of
from shared.weights.pulled import PulledVersion


def tensors(pulled: PulledVersion) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor by name, on the CPU, in its published dtype, on memory of its own."""
    for entry, data in pulled.tensors():
        dtype = getattr(torch, entry.dtype)
        # frombuffer takes no empty buffer
        flat = torch.frombuffer(data, dtype=dtype) if entry.n_bytes else torch.empty(0, dtype=dtype)
        yield entry.name, flat.view(entry.global_shape)


def differing(manifest: Manifest, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names in `manifest` whose tensors are not among `loaded` bit for bit, in the published dtype.

    Every shard is compared with the digest that its publisher gave it.
    """
    shards: dict[str, list[TensorEntry]] = {}
    for part in manifest.parts:
        for entry in part.tensors:
            shards.setdefault(entry.name, []).append(entry)
    right = {
        name
        for name, tensor in loaded
        if name in shards and all(_digest_of_shard(tensor, entry) == entry.digest for entry in shards[name])
    }
    return sorted(shards.keys() - right)


def _digest_of_shard(tensor: torch.Tensor, entry: TensorEntry) -> str:
    if tuple(tensor.shape) != entry.global_shape:
        return f"another shape: {tuple(tensor.shape)}"
    box = tuple(slice(low, low + size) for low, size in zip(entry.offset, entry.local_shape, strict=True))
    shard = tensor[box].detach().to(getattr(torch, entry.dtype)).cpu().contiguous()
    return digest_of(shard.reshape(-1).view(torch.uint8).numpy().data) if entry.n_bytes else digest_of(b"")
