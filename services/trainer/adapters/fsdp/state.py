"""Reads and writes one rank's rows of the weights and of AdamW's moments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlboost.services.trainer.adapters.ranks.offload import local_tensor
from rlboost.services.trainer.adapters.ranks.trainable import WEIGHT

_STEP = "step"


class FsdpOptimizerState:
    """`OptimizerState` of one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, local_value: Callable[[Tensor], Tensor]) -> None:
        """Access `optimizer`; `local_value` reads a tensor that may be offloaded."""
        self._optimizer = optimizer
        self._local_value = local_value

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's rows of a weight or a moment; a buffer has moments of 0."""
        if kind != WEIGHT and not isinstance(parameter, DTensor):
            return torch.zeros_like(parameter)
        return self._local_value(parameter if kind == WEIGHT else self._optimizer.state[parameter][kind])

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite this rank's rows of a weight or a moment."""
        if kind == WEIGHT:
            local_tensor(parameter).copy_(value)
            return
        if not isinstance(parameter, DTensor):
            return
        local = value.to(parameter.device, torch.float32, copy=True)
        self._optimizer.state[parameter][kind] = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""
        if not n_steps:
            self._optimizer.state.clear()
        for values in self._optimizer.state.values():
            values[_STEP] = torch.tensor(float(n_steps))
