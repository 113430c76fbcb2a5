"""One rank's rows of the weights and of what AdamW remembers of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.adapters.ranks.model import WEIGHT
from services.trainer.adapters.ranks.rest import own_part

_STEP = "step"


class OptimizerState:
    """See `services.trainer.adapters.ranks.model.State`."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: Callable[[Tensor], Tensor]) -> None:
        """Look into `optimizer`; `held` tells where this rank's part of a tensor is."""
        self._optimizer = optimizer
        self._held = held

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's rows of a weight or a moment."""
        return self._held(parameter if kind == WEIGHT else self._optimizer.state[parameter][kind])

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite this rank's rows of a weight or a moment."""
        if kind == WEIGHT:
            own_part(parameter).copy_(value)
            return
        assert isinstance(parameter, DTensor)
        own = value.to(parameter.device, torch.float32, copy=True)
        self._optimizer.state[parameter][kind] = DTensor.from_local(
            own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    def set_steps(self, n_steps: int) -> None:
        """Say how many updates the moments come from; 0 forgets them."""
        if not n_steps:
            self._optimizer.state.clear()
        for values in self._optimizer.state.values():
            values[_STEP] = torch.tensor(float(n_steps))
