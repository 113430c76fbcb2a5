"""A causal language model of transformers, cut up over all ranks by FSDP2 (arXiv 2304.11277), and its AdamW.

Each rank keeps a run of rows of every parameter, and of what AdamW remembers of them. A layer's parameters are whole
only while the layer computes. Gradients are summed, and divided once, at the end of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.adapters.ranks.piece import Piece
from services.trainer.adapters.ranks.rest import own_part
from services.trainer.adapters.torch.recompute import recompute_layers
from shared.errors import ConfigError
from shared.training import OptimizerSpec


class RowMap:
    """Which rows of each parameter a rank has. A parameter's name is the one that Hugging Face saves."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rank: int, n_ranks: int) -> None:
        """Map for rank `rank`: as `torch.chunk` does it, so that the last ranks may have fewer rows, or none."""
        self._pieces = {name: _rows(name, shape, rank, n_ranks) for name, shape in shapes.items()}

    def owns(self, name: str) -> bool:
        """Tell whether this rank speaks for its part of a parameter: nobody else has it."""
        return name in self._pieces

    def pieces(self, name: str) -> list[Piece]:
        """Return the one box that this rank has."""
        return [self._pieces[name]]

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Return the boxes' values."""
        del name
        return [value]

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return the parameter's value of its boxes'."""
        del name
        (part,) = parts
        return part


class Network:
    """One rank's part of a model."""

    def __init__(self, source: Path, device: str, *, trained: bool, recomputes: bool = False) -> None:
        """Build it with whatever weights; the process group is there already. All ranks do it at once.

        Args:
            source: a Hugging Face directory, of which only the configuration is read.
            device: `cpu` or `cuda`.
            trained: whether it gets gradients.
            recomputes: whether layers are computed once more for them.

        Raises:
            ConfigError: it holds no causal language model that can be cut up so.

        """
        self.module: Any = _built(source, device, trained=trained, recomputes=recomputes)
        self._parameters: list[tuple[str, Any]] = list(self.module.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters}
        self.map = RowMap(shapes, distributed.get_rank(), distributed.get_world_size())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, which are distributed tensors."""
        yield from self._parameters

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's rows of a parameter."""
        own_part(parameter).copy_(value)


class TrainedNetwork(Network):
    """One rank's part of the model being trained and of its optimizer."""

    def __init__(self, source: Path, device: str, optimizer: OptimizerSpec, *, recomputes: bool) -> None:
        """Build both; see `Network`."""
        super().__init__(source, device, trained=True, recomputes=recomputes)
        self._clip = optimizer.grad_clip
        self._distributed = [parameter for _, parameter in self._parameters]
        self.optimizer = torch.optim.AdamW(
            self._distributed, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )

    def zero_gradients(self) -> None:
        """Forget what was accumulated."""
        self.optimizer.zero_grad()

    def finish_gradients(self, divisor: int) -> float:
        """Divide all ranks' gradients and clip them; return the norm of all before that."""
        for parameter in self._distributed:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        norm: Any = torch.nn.utils.clip_grad_norm_(self._distributed, self._clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return this rank's rows of the gradients that there are."""
        return [parameter.grad for parameter in self._distributed if parameter.grad is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the one that there is."""
        return [self.optimizer]


def _built(source: Path, device: str, *, trained: bool, recomputes: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        # The weights of no rank are ever whole: each reads its own rows.
        with init_empty_weights(include_buffers=False):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
    module.tie_weights()
    if lost := set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}:
        raise ConfigError(
            f"model {source} keeps {min(lost)} beside its parameters, which FSDP does not cut: set "
            "trainer.data_parallel to 1"
        )
    module.requires_grad_(trained)
    if recomputes:
        recompute_layers(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    parts = [*module.get_decoder().layers, module]
    for part in parts:
        # The outermost too, which would stay whole until a backward pass that a frozen model never makes.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # Else it would divide by the number of ranks.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    return module.eval()


def _rows(name: str, shape: tuple[int, ...], rank: int, n_ranks: int) -> Piece:
    each = -(-shape[0] // n_ranks)
    first, end = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
    rest = shape[1:]
    return Piece(name, shape, (first, *(0 for _ in rest)), (end - first, *rest))
