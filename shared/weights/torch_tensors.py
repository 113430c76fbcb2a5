"""Converts between published bytes and torch tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rlboost.shared.model.folder import require_unquantized_tensor, tensor_names
from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.manifest import Shard, TensorEntry, digest_of


def tensors(pulled: PulledVersion, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, or those with these names, on the CPU in its published dtype, each with its own memory."""
    for whole, data in pulled.tensors(names):
        dtype = getattr(torch, whole.dtype)
        # torch.frombuffer rejects an empty buffer.
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        yield whole.name, flat.view(whole.shape)


def named_shards(weights: torch.nn.Module | Mapping[str, torch.Tensor] | str | Path) -> Iterator[Shard]:
    """Yield whole tensors as shards, each copied to the CPU when it is due.

    Args:
        weights: a module, whose tied tensors are taken once; tensors by name; or a folder with safetensors.

    Raises:
        ConfigError: a tensor is quantized.

    """
    if isinstance(weights, torch.nn.Module):
        found: Iterable[tuple[str, torch.Tensor]] = module_tensors(weights)
    elif isinstance(weights, str | Path):
        found = _of_folder(Path(weights))
    else:
        found = weights.items()
    for name, tensor in found:
        data = tensor.detach().cpu().contiguous()
        shape = tuple(data.shape)
        raw = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""
        dtype = str(data.dtype).removeprefix("torch.")
        require_unquantized_tensor(name, dtype)
        yield Shard(name, dtype, shape, (0,) * len(shape), shape, raw)


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters, tied ones once, and its persistent buffers."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    yield from module.named_parameters()
    yield from ((name, tensor) for name, tensor in module.state_dict().items() if name not in parameters)


def _of_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open  # noqa: PLC0415 - a library of those who load models

    name_of = tensor_names(folder)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name_of(name), file.get_tensor(name)


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
