"""What the torch engine keeps and gives away: weights and the optimizer's state as files, weights as shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.ports import Snapshot
from shared.errors import ConfigError, Corrupt
from shared.weights.publisher import Shard

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_RNG, _CUDA_RNG = "rng", "rng.cuda"
_MUON_STATE = "momentum_buffer"
"""What Muon remembers of a matrix, and AdamW of nothing."""


def captured(
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    generators: torch.device | None = None,
    prefix: str = "",
) -> Snapshot:
    """Copy what is trained and the optimizers' state to host memory; return what writes the copy.

    Args:
        trained: by name.
        optimizers: of these; their states are counted on from one to the next.
        generators: the device whose random generators' states go along, and the host's.
        prefix: of the files' names.

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


def in_turn(*writers: Snapshot) -> Snapshot:
    """Return what writes several copies into one directory."""

    def write(directory: Path) -> None:
        for one in writers:
            one(directory)

    return write


def load_state(
    directory: Path,
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    generators: torch.device | None = None,
    prefix: str = "",
) -> None:
    """Read what `captured` wrote with the same arguments.

    Raises:
        Corrupt: it does not fit this model.
        ConfigError: it is of another optimizer.

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
            _take(optimizer, first, states)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error


def shards_of(values: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
    """Yield whole tensors as one shard each; its bytes are the tensor's own where that is in host memory.

    From a GPU the next tensor is on its way already while a shard is used.
    """
    ahead: _Coming | None = None
    for name, value in values:
        coming = _Coming(name, value)
        if ahead is not None:
            yield ahead.shard()
        ahead = coming
    if ahead is not None:
        yield ahead.shard()


class _Coming:
    """A tensor on its way to host memory."""

    def __init__(self, name: str, value: Tensor) -> None:
        self._name = name
        self._value = value.contiguous()
        self._there: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self._value = torch.empty_like(self._value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._there = torch.cuda.current_stream(value.device).record_event()

    def shard(self) -> Shard:
        if self._there is not None:
            self._there.synchronize()
        raw = self._value.reshape(-1).view(torch.uint8).numpy().data
        shape = tuple(self._value.shape)
        return Shard(self._name, str(self._value.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, raw)


def distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out all but the first of tensors that share their memory, as Hugging Face does when it saves."""
    seen: set[tuple[int, int]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def _numbered(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """Yield each optimizer behind the number of its first parameter."""
    first = 0
    for optimizer in optimizers:
        yield first, optimizer
        first += _n_parameters(optimizer)


def _n_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _take(optimizer: torch.optim.Optimizer, first: int, states: Mapping[int, dict[str, Tensor]]) -> None:
    """Give an optimizer the states of its parameters, of which `first` is the first one's number."""
    numbers = range(first, first + _n_parameters(optimizer))
    mine = {number - first: states[number] for number in numbers if number in states}
    if any((_MUON_STATE in state) is isinstance(optimizer, torch.optim.AdamW) for state in mine.values()):
        raise ConfigError(
            "the checkpoint is of another optimizer: set optimizer.name to what it was made with, or begin with that "
            "job's weights alone (model: .rlboost/runs/JOB/model, and no trainer.resume)"
        )
    optimizer.load_state_dict({"state": mine, "param_groups": optimizer.state_dict()["param_groups"]})


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states that an adapter's dropout draws from."""
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
