"""Reads and writes the state of megatron-core's optimizers, one whole float32 tensor per parameter.

With the distributed optimizer each data-parallel rank holds a contiguous range of a parameter's values, or none; of an
expert's, with expert parallelism, each rank that has the same experts.
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
        # A second one has the experts if they are divided over data-parallel ranks.
        self._optimizers: list[Any] = model.optimizer.chained_optimizers
        self._distributed = isinstance(self._optimizers[0], DistributedOptimizer)

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return a master weight or a moment, in the parameter's shape.

        With the distributed optimizer this is a collective call of the ranks that share the parameter.

        Args:
            parameter: a parameter of the model.
            kind: `WEIGHT`, or one of `MOMENTS` after the first step.

        """
        master, span = self._master_of(parameter)
        if not self._distributed:
            assert master is not None
            return self._value(parameter, master, kind)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            whole[span] = self._value(parameter, master, kind)
        # Summed as integers, which keeps every bit: all values but one are zero.
        group = (
            parallel_state.get_expert_data_parallel_group()
            if _is_divided_expert(parameter)
            else parallel_state.get_data_parallel_group()
        )
        distributed.all_reduce(whole.view(torch.int32), group=group)
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
                self._optimizer_of(parameter).optimizer.state[master][kind] = local.clone()

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""
        for inner in (wrapper.optimizer for wrapper in self._optimizers):
            if not n_steps:
                inner.state.clear()
            if USING_PYTORCH_OPTIMIZER:
                for values in inner.state.values():
                    values[_STEP] = torch.tensor(float(n_steps))
            else:  # TransformerEngine's or apex's
                for group in inner.param_groups:
                    group[_STEP] = n_steps

    def _optimizer_of(self, parameter: Tensor) -> Any:
        return self._optimizers[1 if _is_divided_expert(parameter) else 0]

    def _value(self, parameter: Tensor, master: Tensor, kind: str) -> Tensor:
        if kind == WEIGHT:
            return self._local_value(master)
        return self._local_value(self._optimizer_of(parameter).optimizer.state[master][kind])

    def _master_of(self, parameter: Tensor) -> tuple[Tensor | None, slice]:
        """Return the tensor that this rank's Adam updates, and its range in the flattened parameter."""
        optimizer = self._optimizer_of(parameter)
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), slice(None)
        if parameter not in optimizer.model_param_gbuf_map:
            return None, slice(0)
        group, order = optimizer.model_param_group_index_map[parameter]
        span = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - no public accessor
        return optimizer.optimizer.param_groups[group]["params"][order], slice(span.start, span.end)


def _is_divided_expert(parameter: Tensor) -> bool:
    """Return True for a parameter of an expert that not all data-parallel ranks have; megatron-core marks it."""
    return not getattr(parameter, "allreduce", True)
