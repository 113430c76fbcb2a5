"""One rank's shards of a model's tensors (FSDP2, arXiv 2304.11277), and their AdamW.

Each rank has a range of rows of every parameter and of its moments; with several groups of ranks (HSDP) each group has
the whole model. Gradients are summed over micro-batches and ranks, and divided once per update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlboost.services.trainer.adapters.ranks.offload import local_tensor
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.ranks.trainable import NO_TENSORS
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.model.experts import matrices, n_matrices, names_of_expert


class FsdpWeightMap:
    """`WeightMap` of one rank: a range of rows of each parameter, which are whole experts if it has experts."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], rank: int, n_ranks: int, buffers: frozenset[str] = frozenset()
    ) -> None:
        """Map for a rank of a group that divides rows as `torch.chunk` does: its last ranks may have fewer, or none.

        Args:
            shapes: shapes of all tensors, by name.
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
    """One rank's shards of some tensors: of a whole model, of one below an adapter, or of an adapter."""

    def __init__(
        self, parameters: Mapping[str, Tensor], mesh: DeviceMesh, buffers: Mapping[str, Tensor] = NO_TENSORS
    ) -> None:
        """Take the parameters of a module that `sharding` made.

        Args:
            parameters: by the names under which they are exported, as `DTensor`.
            mesh: over which they are sharded.
            buffers: those that checkpoints have.

        """
        self._tensors = {**parameters, **buffers}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        shards = mesh["shards"]
        self.weight_map = FsdpWeightMap(shapes, shards.get_local_rank(), shards.size(), frozenset(buffers))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, as `DTensor`, and the buffers that checkpoints have."""
        yield from self._tensors.items()

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's rows of a parameter."""
        local_tensor(parameter).copy_(value)


class TrainedFsdpModel(FsdpModel):
    """One rank's shards of the trained tensors, with their optimizer."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: OptimizerSpec | CriticSpec,
        mesh: DeviceMesh,
        buffers: Mapping[str, Tensor] = NO_TENSORS,
    ) -> None:
        """See `FsdpModel`."""
        super().__init__(parameters, mesh, buffers)
        self._clip = optimizer.grad_clip
        self._dtensors = list(parameters.values())
        self.optimizer = torch.optim.AdamW(
            self._dtensors, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad()

    def finish_gradients(self, divisor: int) -> float:
        """Divide the gradients by `divisor` and clip them; return their global norm before clipping."""
        for gradient in self.gradients():
            gradient.div_(divisor)
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
