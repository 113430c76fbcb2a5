"""What megatron-core's optimizers remember of each parameter, whole and in float32, whichever optimizer it is.

The distributed one keeps of each parameter a run of values on each data-parallel rank, or nothing. Import after
`hook.install()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed

from services.trainer.adapters.megatron.model import TrainedNetwork
from services.trainer.adapters.ranks.model import WEIGHT

_STEP = "step"


class OptimizerState:
    """The master weights and Adam's moments of one rank's parameters."""

    def __init__(self, model: TrainedNetwork, held: Callable[[Tensor], Tensor]) -> None:
        """Look into the model's optimizer; `held` tells where a tensor's values are."""
        self._held = held
        self._optimizer: Any = model.optimizer.chained_optimizers[0]
        self._distributed = isinstance(self._optimizer, DistributedOptimizer)

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return the master weight or a moment, in the parameter's shape.

        With the distributed optimizer the data-parallel ranks put it together, so all of them must ask.

        Args:
            parameter: of the model.
            kind: `WEIGHT` or one of `MOMENTS`; those are there after the first step.

        """
        master, place = self._updated(parameter)
        if not self._distributed:
            assert master is not None
            return self._value(master, kind)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            whole[place] = self._value(master, kind)
        # Added up as integers, which keeps every bit: all but one are zero.
        distributed.all_reduce(whole.view(torch.int32), group=parallel_state.get_data_parallel_group())
        return whole.view(parameter.shape)

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a master weight, with it the parameter, or a moment."""
        master, place = self._updated(parameter)
        value = value.to(parameter.device)
        if kind == WEIGHT:
            parameter.data.copy_(value)
        if master is not None:
            mine = (value.reshape(-1)[place] if self._distributed else value).to(torch.float32)
            if kind == WEIGHT:
                master.data.copy_(mine)
            else:
                self._optimizer.optimizer.state[master][kind] = mine.clone()

    def set_steps(self, n_steps: int) -> None:
        """Say how many updates the moments come from; 0 forgets them."""
        inner = self._optimizer.optimizer
        if not n_steps:
            inner.state.clear()
        if USING_PYTORCH_OPTIMIZER:
            for values in inner.state.values():
                values[_STEP] = torch.tensor(float(n_steps))
        else:  # TransformerEngine's or apex's
            for group in inner.param_groups:
                group[_STEP] = n_steps

    def _value(self, master: Tensor, kind: str) -> Tensor:
        if kind == WEIGHT:
            return self._held(master)
        return self._held(self._optimizer.optimizer.state[master][kind])

    def _updated(self, parameter: Tensor) -> tuple[Tensor | None, slice]:
        """Return what this rank's Adam updates of a parameter, and the run of the flat parameter that it is."""
        optimizer = self._optimizer
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), slice(None)
        if parameter not in optimizer.model_param_gbuf_map:
            return None, slice(0)
        group, order = optimizer.model_param_group_index_map[parameter]
        run = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - nothing public tells
        return optimizer.optimizer.param_groups[group]["params"][order], slice(run.start, run.end)
