"""A policy trained with megatron-core: tensor, pipeline and data parallel, with its distributed optimizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from services.trainer.adapters.megatron.shape import check, shape_of
from services.trainer.adapters.ranks.policy import RanksPolicy
from shared.errors import ConfigError
from shared.training import OptimizerSpec, TrainerSpec


class MegatronPolicy(RanksPolicy):
    """See `RanksPolicy`. With `bfloat16` the weights are bfloat16 and the optimizer keeps a float32 master of each."""

    def __init__(self, spec: TrainerSpec, optimizer: OptimizerSpec, **settings: Any) -> None:
        """See `RanksPolicy`.

        Raises:
            ConfigError: megatron-core is not installed, or there are too few GPUs.

        """
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise ConfigError("trainer.backend: megatron needs megatron-core: pip install 'rlboost[megatron]'")
        super().__init__("megatron", spec, optimizer, **settings)

    def _described(self, source: Path, config: Any) -> dict[str, Any]:
        del source
        shape = shape_of(config)
        check(shape, self._layout)
        return {"shape": shape}
