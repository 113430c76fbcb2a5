"""The routers of transformers' mixtures of experts, where engine and trainer hook them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def routers_of(model: Any) -> list[tuple[int, Any]]:
    """Return (layer, router) of a transformers model: the `gate` next to the `experts` of a layer; none if dense."""
    return [
        (int(match[1]), layer.gate)
        for name, layer in model.named_modules()
        if hasattr(layer, "gate") and hasattr(layer, "experts") and (match := _LAYER.search(name))
    ]


def is_routing(output: Any) -> bool:
    """Return True if a router returned logits, weights and indices of experts, as tensors in this order."""
    return isinstance(output, tuple) and [one.is_floating_point() for one in output] == [True, True, False]


def require_routing(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's logits [tokens, experts], and weights and indices of experts [tokens, experts per token].

    Raises:
        ConfigError: it returned something else, as routers of some families and of earlier releases do.

    """
    if not is_routing(output):
        raise ConfigError(
            "the model's routers return no logits, weights and indices of experts: remove trainer.router_replay and "
            "trainer.router_aux_loss_coef, or install the release of transformers that constraints.txt names"
        )
    logits, weights, indices = output
    return logits, weights, indices
