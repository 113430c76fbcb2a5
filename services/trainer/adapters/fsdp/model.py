"""A causal language model of transformers, sharded by FSDP2 (arXiv 2304.11277), and its AdamW.

Each rank has a range of rows of every parameter and of its moments; with several groups of ranks (HSDP) each group has
the whole model. A layer's parameters are gathered only while the layer computes. Gradients are summed over
micro-batches and ranks, and divided once per update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlboost.services.trainer.adapters.ranks.offload import local_tensor
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.model.experts import matrices, n_matrices, names_of_expert


class FsdpWeightMap:
    """`WeightMap` of one rank: a range of rows of each parameter, which are whole experts if it has experts."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], rank: int, n_ranks: int, buffers: frozenset[str] = frozenset()
    ) -> None:
        """Map for a rank of a group that divides rows as `torch.chunk` does: its last ranks may have fewer, or none.

        Args:
            shapes: of all tensors, by name.
            rank: the rank's number in the group.
            n_ranks: the group's number of ranks.
            buffers: names of the tensors that every rank has whole.

        """
        self._is_first, self._buffers = rank == 0, buffers
        self._rows = {
            name: TensorSlice.whole(name, shape) if name in buffers else _rows(name, shape, rank, n_ranks)
            for name, shape in shapes.items()
        }
        self._slices = {name: _matrices(rows) for name, rows in self._rows.items()}

    def owns(self, name: str) -> bool:
        """Return True: no other rank of the group has the same rows. Its first exports buffers, which all have."""
        return self._is_first or name not in self._buffers

    def slices(self, name: str) -> list[TensorSlice]:
        """Return this rank's rows: one slice, or the matrices of each of its experts."""
        return self._slices[name]

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Return the value as the only slice, or the matrices of its experts."""
        return matrices(name, value) if n_matrices(name) else [value]

    def join(self, name: str, values: list[Tensor]) -> Tensor:
        """Join the slices; the inverse of `split`."""
        if not n_matrices(name):
            (value,) = values
            return value
        shape = self._rows[name].local_shape
        return torch.cat(values).reshape(shape) if values else torch.zeros(shape)


class FsdpModel:
    """One rank's shard of a model."""

    def __init__(
        self,
        source: Path,
        device: str,
        attention: str,
        *,
        mesh: DeviceMesh,
        trained: bool,
        activation_checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """Build it with uninitialized weights. A collective call of all ranks.

        Args:
            source: a Hugging Face directory; only its configuration is read.
            device: `cpu` or `cuda`.
            attention: the model's `attn_implementation`.
            mesh: its last dimension are the ranks that share the model. A dimension before it makes it HSDP:
                gradients are also summed over it.
            trained: whether parameters get gradients.
            activation_checkpointing: whether layers are recomputed in the backward pass.
            compiled: whether layers are compiled.

        Raises:
            ConfigError: the directory holds no causal language model, or one that FSDP2 cannot shard.

        """
        self.module: Any = _sharded_module(
            source,
            device,
            attention,
            mesh=mesh,
            trained=trained,
            activation_checkpointing=activation_checkpointing,
            compiled=compiled,
        )
        self._parameters: list[tuple[str, Any]] = list(self.module.named_parameters())
        saved = self.module.state_dict()
        self._buffers = [(name, buffer) for name, buffer in self.module.named_buffers() if name in saved]
        shapes = {name: tuple(tensor.shape) for name, tensor in (*self._parameters, *self._buffers)}
        buffers = frozenset(name for name, _ in self._buffers)
        self.weight_map = FsdpWeightMap(shapes, mesh.get_local_rank("shards"), mesh["shards"].size(), buffers)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, as `DTensor`, and the buffers that checkpoints have."""
        yield from self._parameters
        yield from self._buffers

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's rows of a parameter."""
        local_tensor(parameter).copy_(value)


class TrainedFsdpModel(FsdpModel):
    """One rank's shard of the trained model, with its optimizer."""

    def __init__(
        self,
        source: Path,
        device: str,
        attention: str,
        optimizer: OptimizerSpec,
        *,
        mesh: DeviceMesh,
        activation_checkpointing: bool,
        compiled: bool,
    ) -> None:
        """Build both. See `FsdpModel`."""
        super().__init__(
            source,
            device,
            attention,
            mesh=mesh,
            trained=True,
            activation_checkpointing=activation_checkpointing,
            compiled=compiled,
        )
        self._clip = optimizer.grad_clip
        self._dtensors = [parameter for _, parameter in self._parameters]
        self.optimizer = torch.optim.AdamW(
            self._dtensors, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad()

    def finish_gradients(self, divisor: int) -> float:
        """Divide the gradients by `divisor` and clip them; return their global norm before clipping."""
        for parameter in self._dtensors:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        norm: Any = torch.nn.utils.clip_grad_norm_(self._dtensors, self._clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [parameter.grad for parameter in self._dtensors if parameter.grad is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW alone."""
        return [self.optimizer]


def _sharded_module(
    source: Path,
    device: str,
    attention: str,
    *,
    mesh: DeviceMesh,
    trained: bool,
    activation_checkpointing: bool,
    compiled: bool,
) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        # On the meta device: no rank ever holds whole weights, each reads its own rows.
        with init_empty_weights(include_buffers=False):
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, experts_implementation=EXPERTS
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
    module.tie_weights()
    module.requires_grad_(trained)
    if compiled:
        compile_layers(module, device)
    if activation_checkpointing:
        checkpoint_activations(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for sharded in (*module.get_decoder().layers, module):
        # The root too: by default it stays gathered until the backward pass, which a frozen model does not have.
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        # By default FSDP2 divides by the number of ranks.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    return module.eval()


def _matrices(rows: TensorSlice) -> list[TensorSlice]:
    """Return the matrices of the experts that are the rows of a fused parameter, or the rows of any other."""
    if not (n_parts := n_matrices(rows.name)):
        return [rows]
    n_rows, n_columns = rows.global_shape[1:]
    return [
        TensorSlice.whole(name, (n_rows // n_parts, n_columns))
        for expert in range(rows.offset[0], rows.end[0])
        for name in names_of_expert(rows.name, expert)
    ]


def _rows(name: str, shape: tuple[int, ...], rank: int, n_ranks: int) -> TensorSlice:
    each = -(-shape[0] // n_ranks)
    first, end = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
    dims = shape[1:]
    return TensorSlice(name, shape, (first, *(0 for _ in dims)), (end - first, *dims))
