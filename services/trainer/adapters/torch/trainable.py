"""The parts that a rank is built from, for any backend, and their tensors in files and in host memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlboost.services.trainer.adapters.checkpoint_folder import CRITIC_PREFIX
from rlboost.services.trainer.adapters.torch.ranks import TensorSlice
from rlboost.services.trainer.adapters.torch.tensors import (
    SliceReader,
    host_copies,
    write_slices,
)
from rlboost.services.trainer.domain.loss.policy import divisor
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.services.trainer.ports.engine import Loaded, Snapshot
from rlboost.shared.errors import ConfigError, Corrupt, DiskFull
from rlboost.shared.files import write_error
from rlboost.shared.job.algorithm import Aggregation
from rlboost.shared.job.training import Offload

# --- The parts that a rank is built from ------------------------------------------------------------------------------


MicroBatch = Sequence[SequenceRow]
LossGradientFn = Callable[[int, Tensor], Tensor]
"""(index of the micro-batch, log-probabilities or values of its trained tokens) -> gradient of the loss with respect to
them. Called on the ranks that compute log-probabilities."""


class Balancing(NamedTuple):
    """The weight of the load-balancing loss of a mixture of experts in an update's loss."""

    coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    """See `domain.loss.policy`."""

    def factor(self, rows: MicroBatch) -> float:
        """Return the factor of a micro-batch's load-balancing loss."""
        return self.coefficient * divisor(self.aggregation, [row.n_loss_tokens for row in rows])


NO_BALANCING = Balancing()


WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's."""
MOMENTUM = "momentum_buffer"
"""Muon's only moment."""
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class WeightMap(Protocol):
    """Maps each parameter of a rank, by the backend's own name, to slices of Hugging Face tensors."""

    def owns(self, name: str) -> bool:
        """Return True if this rank exports the parameter; of several ranks with the same slices one does."""

    def slices(self, name: str) -> list[TensorSlice]:
        """Return the slices that make up the parameter, in the order of `split` and `join`."""

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Split a value of the parameter's shape into its slices."""

    def join(self, name: str, values: list[Tensor]) -> Tensor:
        """Join slices into a value of the parameter's shape; the inverse of `split`."""


class Model(Protocol):
    """One rank's shard of a model, or of an adapter on one."""

    @property
    def weight_map(self) -> WeightMap:
        """Where the parameters are in the Hugging Face tensors."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters under the backend's own names."""

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's slice of a parameter."""


class TrainedModel(Model, Protocol):
    """One rank's shard of what is trained, with its optimizer."""

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""

    def finish_gradients(self, divisor: int) -> float:
        """Sum the gradients over all ranks, divide them by `divisor`, and return their global norm before clipping.

        Here or in `update` they are clipped.
        """

    def update(self, learning_rate: float) -> None:
        """Apply the gradients, clipped if `finish_gradients` has not clipped them."""

    def gradients(self) -> Iterable[Tensor]:
        """Return the tensors that hold gradients between the calls."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The torch optimizers, whose state and parameters can be offloaded."""


class Forward(Protocol):
    """Runs micro-batches through one rank's shard of a model. A collective call: all ranks make it together."""

    def columns(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, or a critic's values, on the ranks that compute them.

        They are [trained tokens].
        """


class ForwardBackward(Forward, Protocol):
    """`Forward` of the trained model."""

    def accumulate(self, batches: Sequence[MicroBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
        """Run forward and backward, adding to the gradients; return sums about the routers of experts."""


class OptimizerState(Protocol):
    """Master weights and optimizer moments of one rank's parameters."""

    def kinds(self, parameter: Tensor) -> Sequence[str]:
        """Return the moments of a parameter; empty for a buffer."""

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's slice of a master weight or a moment. A collective call."""

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a moment, or a master weight and the parameter with it."""

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""


class Frozen(NamedTuple):
    """A model that keeps the weights that it was loaded with: a reference model, or the model below an adapter."""

    model: Model
    passes: Forward


class Trainable(NamedTuple):
    """What is trained, with the objects that run and update it."""

    model: TrainedModel
    passes: ForwardBackward
    state: OptimizerState
    base: Frozen | None = None
    """The model below an adapter; None if the whole model is trained."""
    initial: Mapping[str, Tensor] = NO_TENSORS
    """Whole values of tensors that a model's files do not have."""
    adapter_json: str = ""
    """PEFT's `adapter_config.json` if an adapter is trained."""

    def frozen(self, what: Loaded) -> Frozen | None:
        """Return the frozen model with the weights of one kind; None if these are trained."""
        return self.base if what == "base" else None


# --- One rank's slices of a model in safetensors files: what it loads, exports, and saves in checkpoints --------------


_STEPS_FILE = "steps.txt"

ValueFn = Callable[[Tensor], Tensor]


def fill(trainable: Trainable, reader: SliceReader | None, initial: Mapping[str, Tensor] = NO_TENSORS) -> None:
    """Overwrite what is trained with values of files, but for those in `initial`, which are whole tensors by name.

    Without files the others stay as they are.

    Raises:
        ValueError: the files lack a tensor, or it has another shape.

    """
    for name, parameter in trainable.model.parameters():
        if reader is not None or name in initial:
            trainable.state.set(parameter, WEIGHT, _read(trainable.model, name, reader, initial))


def fill_frozen(model: Model, reader: SliceReader) -> None:
    """Overwrite a model that is not trained with values of files; see `fill`."""
    for name, parameter in model.parameters():
        model.put(parameter, _read(model, name, reader))


def slices_of(model: Model) -> list[TensorSlice]:
    """Return the slices of Hugging Face tensors that this rank has."""
    return [s for name, _ in model.parameters() for s in model.weight_map.slices(name)]


def exported_slices(
    model: Model, value_of: ValueFn, names: Container[str] | None = None, *, exports: bool
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yield the slices that this rank exports. All ranks must iterate.

    Args:
        model: this rank's shard.
        value_of: returns a value of a parameter's shape; may be a collective call.
        names: those of the parameters; None for all.
        exports: False if another rank has the same slices and exports them.

    """
    weight_map = model.weight_map
    for name, parameter in model.parameters():
        if names is not None and name not in names:
            continue
        value = value_of(parameter)
        if not exports or not weight_map.owns(name):
            continue
        for s, local in zip(weight_map.slices(name), weight_map.split(name, value), strict=True):
            if math.prod(s.local_shape):
                yield s, local


class RankFiles(NamedTuple):
    """The names of one rank's files, and whether it exports its slices."""

    rank: int
    exports: bool
    """False if another rank has the same slices and exports them."""

    def slices(
        self, kind: str, model: Model, value_of: ValueFn, names: Container[str] | None = None
    ) -> tuple[str, dict[TensorSlice, Tensor]]:
        """Return the file's name of one kind, and copies of the slices in it. The arguments are `exported_slices`'."""
        exported = exported_slices(model, value_of, names, exports=self.exports)
        return f"{kind}-{self.rank:04d}.safetensors", host_copies(exported)

    def checkpoint(
        self, trained: Mapping[str, Trainable], n_steps: int
    ) -> Iterator[tuple[str, dict[TensorSlice, Tensor]]]:
        """Yield master weights and moments of what is trained, file by file; any other layout can read them.

        Args:
            trained: prefix of the file names -> this rank's shard.
            n_steps: updates that the moments contain.

        """
        for prefix, (model, _, state, *_) in trained.items():
            for kind, names in _kinds(model, state, n_steps).items():
                yield self.slices(f"{prefix}{kind}", model, partial(state.get, kind=kind), names)

    def save(self, folder: Path, trained: Mapping[str, Trainable], n_steps: int) -> None:
        """Write a checkpoint into an existing folder, each file after all ranks have gathered it.

        Raises:
            DiskFull: there is no space on this rank's machine. All ranks can take the next call.
            Fatal: a file cannot be written for another reason.

        """
        full: DiskFull | None = None
        # The disk of one rank may be full: it still gathers every kind with the others.
        for name, values in self.checkpoint(trained, n_steps):
            try:
                write_file(folder / name, values)
            except DiskFull as error:
                full = error
            del values  # before the next kind is gathered
        if full is not None:
            raise full
        if self.rank == 0:
            with _disk_errors(folder / _STEPS_FILE):
                _write_steps(folder, n_steps)

    def capture(self, trained: Mapping[str, Trainable], n_steps: int) -> Snapshot:
        """Copy a checkpoint to host memory; return a writer of the copy. For a rank that is alone."""
        files = dict(self.checkpoint(trained, n_steps))

        def write(directory: Path) -> None:
            for name, values in files.items():
                try:
                    write_slices(directory / name, values)
                except SafetensorError as error:
                    raise OSError(str(error)) from error
            _write_steps(directory, n_steps)

        return write


def _write_steps(folder: Path, n_steps: int) -> None:
    (folder / _STEPS_FILE).write_text(str(n_steps), encoding="utf-8")


def write_file(file: Path, values: Mapping[TensorSlice, Tensor]) -> None:
    """Write copies of slices into a file, unless there are none.

    Raises:
        DiskFull, Fatal: it cannot be written.

    """
    if values:
        with _disk_errors(file):
            write_slices(file, values)


def load_checkpoint(folder: Path, trained: Mapping[str, Trainable]) -> int:
    """Read what `RankFiles.save` wrote, in any layout; return the number of updates.

    Raises:
        Corrupt: it does not match this model.
        ConfigError: it is another optimizer's.

    """
    what = "checkpoint"
    try:
        n_steps = int((folder / _STEPS_FILE).read_text(encoding="utf-8"))
        for prefix, (model, _, state, *_) in trained.items():
            what = "the critic in checkpoint" if prefix == CRITIC_PREFIX else "checkpoint"
            kinds = _kinds(model, state, n_steps)
            if n_steps and any(folder.glob(f"{prefix}{MOMENTUM}-*")) is not (MOMENTUM in kinds):
                raise ConfigError(
                    "the checkpoint was written with another optimizer: set optimizer.name to that one, or start from "
                    "the weights alone (model: .rlboost/runs/JOB/model, without trainer.resume)"
                )
            for kind, names in kinds.items():
                with SliceReader(sorted(folder.glob(f"{prefix}{kind}-*.safetensors"))) as reader:
                    for name, parameter in model.parameters():
                        if name in names:
                            state.set(parameter, kind, _read(model, name, reader))
            state.set_steps(n_steps)
    except (OSError, ValueError, SafetensorError) as error:
        raise Corrupt(f"{what} {folder} does not match this model: {error}") from error
    return n_steps


def _kinds(model: Model, state: OptimizerState, n_steps: int) -> dict[str, set[str]]:
    """Return what a checkpoint has, by names of parameters: there are no moments before the first step."""
    kinds = {WEIGHT: {name for name, _ in model.parameters()}}
    for name, parameter in model.parameters() if n_steps else ():
        for kind in state.kinds(parameter):
            kinds.setdefault(kind, set()).add(name)
    return kinds


def _read(model: Model, name: str, reader: SliceReader | None, initial: Mapping[str, Tensor] = NO_TENSORS) -> Tensor:
    """Return this rank's value of a parameter: a part of its initial value if it has one, otherwise of files."""
    slices = model.weight_map.slices(name)
    if (whole := initial.get(name)) is not None:
        return model.weight_map.join(name, [s.of(whole) for s in slices])
    assert reader is not None
    return model.weight_map.join(name, [reader.read(s) for s in slices])


@contextmanager
def _disk_errors(file: Path) -> Iterator[None]:
    """Translate errors of writing a file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(error, f"{file} cannot be written: {error}; free space there") from error


# --- Offloads tensors to host memory while other processes use the device, and onloads them bit for bit ---------------
# megatron-core's parameters and gradients are views into flat buffers, FSDP2's are views into padded ones, and both
# libraries hold further views. So storages below the views are freed and refilled; every view stays valid. Moving a
# parameter to another device instead would lose the hook with which megatron-core collects its gradient. For the same
# reason megatron-core's own `offload_to_cpu` is not used; its `offload_grad_buffers` brings buffers back empty.


GradientsFn = Callable[[], tuple[Iterable[Tensor], bool]]
"""Returns the tensors that hold gradients, and True if any were accumulated; otherwise they are all zeros."""

_Offloaded = dict[UntypedStorage, tuple[int, Tensor | None]]
"""Freed storage -> its size in bytes, and the host copy of its content; None for zeros."""


class Offloader:
    """Moves weights, gradients and optimizer state between device and host, when asked.

    It frees storages below tensors: read offloaded ones through `local_value` only. Copies go through host buffers that
    are allocated once and reused, pinned if the device is a GPU.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        what: Offload,
        gradients: GradientsFn,
    ) -> None:
        """Leave everything on `device` for now.

        Args:
            weights: offloaded with `all`; includes the parameters of the optimizers.
            optimizers: their state, and their own copies of weights, are offloaded with `optimizer` and `all`.
            device: where the tensors are when they are not offloaded.
            what: what is offloaded.
            gradients: returns the gradients, which are offloaded with the weights.

        """
        self._weights = list(weights)
        self._optimizers = list(optimizers)
        self._device = device
        self._what = what
        self._gradients = gradients
        self._offloaded_weights: _Offloaded = {}
        self._offloaded_state: _Offloaded = {}
        self._weights_offloaded = self._optimizer_offloaded = False
        self._free_buffers: dict[int, list[Tensor]] = defaultdict(list)
        """Host buffers for reuse, by size."""

    @property
    def is_offloaded(self) -> bool:
        """True if all selected tensors are in host memory."""
        return self._weights_offloaded and self._optimizer_offloaded

    def offload(self) -> None:
        """Move the selected tensors to host memory and release the device's memory to other processes."""
        if self._what == "none":
            return
        if not self._weights_offloaded:
            self._weights_offloaded = True
            gradients, accumulated = self._gradients()
            self._free(gradients, self._offloaded_weights, zeros=not accumulated)
            if self._what == "all":
                self._free(self._weights, self._offloaded_weights)
        if not self._optimizer_offloaded:
            self._optimizer_offloaded = True
            self._free(self._optimizer_tensors(), self._offloaded_state)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def onload_weights(self) -> None:
        """Move back what forward and backward need."""
        if self._weights_offloaded:
            self._weights_offloaded = False
            self._refill(self._offloaded_weights)

    def onload(self) -> None:
        """Move back everything, as an optimizer step needs it."""
        self.onload_weights()
        if self._optimizer_offloaded:
            self._optimizer_offloaded = False
            self._refill(self._offloaded_state)

    def local_value(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a weight or moment, on host or device; valid until the next onload."""
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        _, host = self._offloaded_weights.get(storage) or self._offloaded_state.get(storage) or (0, None)
        if host is None:
            return local
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(host.untyped_storage(), local.storage_offset(), local.size(), local.stride())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        of_model = {_storage(weight) for weight in self._weights}
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
            for group in optimizer.param_groups:
                yield from (parameter for parameter in group["params"] if _storage(parameter) not in of_model)

    def _free(self, tensors: Iterable[Tensor], offloaded: _Offloaded, *, zeros: bool = False) -> None:
        """Copy the storages below `tensors` to host memory, unless they hold zeros, and free them."""
        for tensor in tensors:
            storage = _storage(tensor)
            n_bytes = storage.nbytes()
            if storage in offloaded or storage.device.type != self._device.type or not n_bytes:
                continue
            if not storage.resizable():
                continue  # a mapped file, or shared with numpy, on the CPU
            host = None
            if not zeros:
                content = _content(storage)
                free = self._free_buffers[n_bytes]
                host = (free.pop() if free else self._host_buffer(content)).copy_(content, non_blocking=True)
            offloaded[storage] = n_bytes, host
            storage.resize_(0)

    def _host_buffer(self, content: Tensor) -> Tensor:
        return torch.empty_like(content, device="cpu", pin_memory=self._device.type == "cuda")

    def _refill(self, offloaded: _Offloaded) -> None:
        for storage, (n_bytes, host) in offloaded.items():
            storage.resize_(n_bytes)
            if host is None:
                _content(storage).zero_()
            else:
                # The next copy into the buffer is enqueued after this one, on the same stream.
                _content(storage).copy_(host, non_blocking=True)
                self._free_buffers[n_bytes].append(host)
        offloaded.clear()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, or the tensor itself; it shares the tensor's memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _storage(tensor: Tensor) -> UntypedStorage:
    return local_tensor(tensor).untyped_storage()


def _content(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
