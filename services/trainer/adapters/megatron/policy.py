"""A policy trained with megatron-core: tensor, pipeline, context, data and expert parallelism."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.megatron.model_shape import require_divisible, shape_of
from rlboost.services.trainer.adapters.megatron.rope import with_frequencies
from rlboost.services.trainer.adapters.ranks.policy import RanksPolicy
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.process.extras import pip_install


class MegatronPolicy(RanksPolicy):
    """`RanksPolicy` on megatron-core. With `bfloat16` weights the optimizer has float32 master weights."""

    def __init__(self, spec: TrainerSpec, optimizer: OptimizerSpec, **settings: Any) -> None:
        """See `RanksPolicy`.

        Raises:
            ConfigError: megatron-core is not installed, or there are too few GPUs.

        """
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise ConfigError(f"trainer.backend: megatron needs megatron-core: {pip_install('megatron')}")
        super().__init__("megatron", spec, optimizer, **settings)

    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        del source
        shape = with_frequencies(shape_of(config), config)
        require_divisible(shape, self._layout)
        return {"shape": shape}
