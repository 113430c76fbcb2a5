"""Snapshots of weights and optimizer state as files, and weights as shards, for the torch engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlboost.services.trainer.adapters.shard_tensors import whole_shard
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.shared.errors import ConfigError, Corrupt
from rlboost.shared.weights.shards import Shard

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_RNG, _CUDA_RNG = "rng", "rng.cuda"
_MUON_STATE = "momentum_buffer"
"""Key of the optimizer state that Muon has and AdamW does not."""


def snapshot_of(
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    generators: torch.device | None = None,
    prefix: str = "",
) -> Snapshot:
    """Copy trained tensors and optimizer state to host memory; return a writer of the copy.

    Args:
        trained: tensors by name.
        optimizers: the tensors' optimizers; parameters are numbered through all of them.
        generators: if set, includes the random state of this device and of the host.
        prefix: what the file names begin with.

    """
    weights = {name: _host_copy(tensor) for name, tensor in trained.items()}
    state = {
        f"{first + index}.{key}": _host_copy(value)
        for first, optimizer in _numbered(optimizers)
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    if generators is not None:
        state |= _generators(generators)

    def write(directory: Path) -> None:
        try:
            save_file(weights, directory / f"{prefix}{_MODEL_FILE}")
            save_file(state, directory / f"{prefix}{_OPTIMIZER_FILE}")
        except SafetensorError as error:
            raise OSError(str(error)) from error

    return write


def write_all(*writers: Snapshot) -> Snapshot:
    """Return a writer that calls several writers in order, with the same directory."""

    def write(directory: Path) -> None:
        for write_one in writers:
            write_one(directory)

    return write


def load_state(
    directory: Path,
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    generators: torch.device | None = None,
    prefix: str = "",
) -> None:
    """Read what `snapshot_of` wrote with the same arguments.

    Raises:
        Corrupt: the files do not match this model.
        ConfigError: the files are another optimizer's.

    """
    try:
        tensors = load_file(directory / f"{prefix}{_MODEL_FILE}")
        state = load_file(directory / f"{prefix}{_OPTIMIZER_FILE}")
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(tensors[name])
        if generators is not None:
            torch.set_rng_state(state.pop(_RNG))
            if generators.type == "cuda":
                torch.cuda.set_rng_state(state.pop(_CUDA_RNG), generators)
        states = _by_index(state)
        for first, optimizer in _numbered(optimizers):
            _load_optimizer(optimizer, first, states)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise Corrupt(f"checkpoint {directory} does not match this model: {error}") from error


def shards_of(values: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
    """Yield whole tensors as one shard each, without a copy if the tensor is in host memory.

    From a GPU the next tensor is copied while the caller uses a shard.
    """
    previous: _HostCopy | None = None
    for name, value in values:
        current = _HostCopy(name, value)
        if previous is not None:
            yield previous.shard()
        previous = current
    if previous is not None:
        yield previous.shard()


class _HostCopy:
    """An asynchronous copy of a tensor to host memory."""

    def __init__(self, name: str, value: Tensor) -> None:
        self._name = name
        self._value = value.contiguous()
        self._copied: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self._value = torch.empty_like(self._value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.current_stream(value.device).record_event()

    def shard(self) -> Shard:
        if self._copied is not None:
            self._copied.synchronize()
        return whole_shard(self._name, self._value)


def without_aliases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without those that share an earlier one's memory, as Hugging Face saves them."""
    seen: set[tuple[int, int]] = set()
    distinct = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen:
            seen.add(key)
            distinct[name] = tensor
    return distinct


def _numbered(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """Yield (number of its first parameter, optimizer)."""
    first = 0
    for optimizer in optimizers:
        yield first, optimizer
        first += _n_parameters(optimizer)


def _n_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _load_optimizer(optimizer: torch.optim.Optimizer, first: int, states: Mapping[int, dict[str, Tensor]]) -> None:
    """Load the states of an optimizer's parameters; `first` is the number of its first parameter."""
    numbers = range(first, first + _n_parameters(optimizer))
    local = {number - first: states[number] for number in numbers if number in states}
    if any((_MUON_STATE in state) is isinstance(optimizer, torch.optim.AdamW) for state in local.values()):
        raise ConfigError(
            "the checkpoint was written with another optimizer: set optimizer.name to that one, or start from the "
            "weights alone (model: .rlboost/runs/JOB/model, without trainer.resume)"
        )
    optimizer.load_state_dict({"state": local, "param_groups": optimizer.state_dict()["param_groups"]})


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that an adapter's dropout uses."""
    states = {_RNG: torch.get_rng_state()}
    if device.type == "cuda":
        states[_CUDA_RNG] = torch.cuda.get_rng_state(device)
    return states


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _by_index(flat: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    nested: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        index, _, key = path.partition(".")
        nested.setdefault(int(index), {})[key] = tensor
    return nested
