"""Scaled rotary positions (linear, llama3, yarn), with the frequencies that transformers computes.

megatron-core has the same scalings, but fixes all numbers of llama3 except its factor.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape


def with_scaled_rope(shape: ModelShape, config: Any) -> ModelShape:
    """Return the shape with the frequencies of a transformers configuration; unchanged if they are not scaled.

    Raises:
        KeyError: a number of the scaling is missing.

    """
    compute = ROPE_INIT_FUNCTIONS.get((config.rope_parameters or {}).get("rope_type", "default"))
    if compute is None:
        return shape
    frequencies, scale = compute(config)
    return shape._replace(rope_frequencies=tuple(frequencies.tolist()), rope_scale=float(scale))
