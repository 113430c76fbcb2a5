"""Rotary positions, scaled ones too (linear, llama3, yarn), with the frequencies that transformers computes.

megatron-core has the same scalings, but fixes all numbers of llama3 except its factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape, shape_of


def with_frequencies(shape: ModelShape, config: Any) -> ModelShape:
    """Return the shape with the rotary frequencies of a transformers configuration.

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


def angles(frequencies: Sequence[float], positions: Tensor) -> Tensor:
    """Return the angles of positions, int64 [tokens], in radians: [tokens, 1, 1, head size]."""
    halves = torch.outer(positions.float(), torch.tensor(frequencies, device=positions.device))
    return torch.cat([halves, halves], 1)[:, None, None]
