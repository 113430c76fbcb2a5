"""The policy whose ranks train with megatron-core."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape, require_divisible, shape_of
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import pip_install


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


def with_frequencies(shape: ModelShape, config: Any) -> ModelShape:
    """Return the shape with the rotary frequencies of a transformers configuration, scaled ones too.

    megatron-core has the same scalings (linear, llama3, yarn), but fixes all numbers of llama3 except its factor.

    Raises:
        KeyError: a number is missing.

    """
    compute = ROPE_INIT_FUNCTIONS.get((config.rope_parameters or {}).get("rope_type", "default"), _unscaled)
    frequencies, scale = compute(config)
    return shape._replace(rope_frequencies=tuple(frequencies.tolist()), rope_scale=float(scale))


def _unscaled(config: Any) -> tuple[Tensor, float]:
    head_size = shape_of(config).head_size
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
