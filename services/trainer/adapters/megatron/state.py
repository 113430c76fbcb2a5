"""Reads and writes the state of megatron-core's optimizers, one whole float32 tensor per parameter.

With the distributed optimizer each data-parallel rank holds a contiguous range of a parameter's values, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.megatron.model import TrainedMegatronModel
from rlboost.services.trainer.adapters.ranks.trainable import WEIGHT

_STEP = "step"


class MegatronOptimizerState:
    """`OptimizerState` of one rank."""

    def __init__(self, model: TrainedMegatronModel, local_value: Callable[[Tensor], Tensor]) -> None:
        """Access the model's optimizer; `local_value` reads a tensor that may be offloaded."""
        self._local_value = local_value
        self._optimizer: Any = model.optimizer.chained_optimizers[0]
        self._distributed = isinstance(self._optimizer, DistributedOptimizer)

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return a master weight or a moment, in the parameter's shape.

        With the distributed optimizer this is a collective call of the data-parallel ranks.

        Args:
            parameter: a parameter of the model.
            kind: `WEIGHT`, or one of `MOMENTS` after the first step.

        """
        master, span = self._master_of(parameter)
        if not self._distributed:
            assert master is not None
            return self._value(master, kind)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            whole[span] = self._value(master, kind)
        # Summed as integers, which keeps every bit: all values but one are zero.
        distributed.all_reduce(whole.view(torch.int32), group=parallel_state.get_data_parallel_group())
        return whole.view(parameter.shape)

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a moment, or a master weight and the parameter with it."""
        master, span = self._master_of(parameter)
        value = value.to(parameter.device)
        if kind == WEIGHT:
            parameter.data.copy_(value)
        if master is not None:
            local = (value.reshape(-1)[span] if self._distributed else value).to(torch.float32)
            if kind == WEIGHT:
                master.data.copy_(local)
            else:
                self._optimizer.optimizer.state[master][kind] = local.clone()

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""
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
            return self._local_value(master)
        return self._local_value(self._optimizer.optimizer.state[master][kind])

    def _master_of(self, parameter: Tensor) -> tuple[Tensor | None, slice]:
        """Return the tensor that this rank's Adam updates, and its range in the flattened parameter."""
        optimizer = self._optimizer
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), slice(None)
        if parameter not in optimizer.model_param_gbuf_map:
            return None, slice(0)
        group, order = optimizer.model_param_group_index_map[parameter]
        span = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - no public accessor
        return optimizer.optimizer.param_groups[group]["params"][order], slice(span.start, span.end)
