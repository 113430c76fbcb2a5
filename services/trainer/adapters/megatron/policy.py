"""A policy trained with megatron-core: tensor, pipeline, context, data and expert parallelism."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.megatron.model_shape import require_divisible, shape_of
from rlboost.services.trainer.adapters.megatron.rope import with_frequencies
from rlboost.services.trainer.adapters.ranks.layout import Layout
from rlboost.services.trainer.adapters.ranks.policy import RanksPolicy
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.extras import pip_install


class MegatronPolicy(RanksPolicy):
    """`RanksPolicy` on megatron-core. With `bfloat16` weights the optimizer has float32 master weights."""

    kind = "megatron"

    def __init__(self, settings: PolicySettings, layout: Layout, **others: Any) -> None:
        """See `RanksPolicy`.

        Raises:
            ConfigError: megatron-core is not installed, or there are too few GPUs.

        """
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise ConfigError(f"trainer.backend: megatron needs megatron-core: {pip_install('megatron')}")
        super().__init__(settings, layout, **others)

    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        del source
        shape = with_frequencies(shape_of(config), config)
        require_divisible(shape, self._layout)
        return {"shape": shape}
