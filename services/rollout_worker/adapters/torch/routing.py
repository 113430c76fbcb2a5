"""Records the experts that a model's routers select in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlboost.shared.model.experts import FAMILIES, shape_of_routing
from rlboost.shared.model.routers import require_routing, routers_of

Experts = Callable[[int], npt.NDArray[np.int64]]
"""A batch size -> the experts of the pass, [batch, tokens, layers, experts per token]."""


class RoutingRecorder:
    """The routers of a transformers model."""

    def __init__(self, model: Any) -> None:
        """Register a hook on each router of `model`."""
        config = model.config.to_dict()
        self.shape = shape_of_routing(config) if config["model_type"] in FAMILIES else None
        """Shape of the routed experts; None if the model is dense or of an untested family."""
        self._selected: dict[int, Tensor] | None = None
        for number, gate in routers_of(model) if self.shape else ():
            gate.register_forward_hook(partial(self._on_output, number))

    @contextmanager
    def recording(self, *, enabled: bool) -> Iterator[Experts]:
        """Record the pass within the context, if `enabled`; yields what returns its experts after it."""
        selected: dict[int, Tensor] = {}
        self._selected = selected if enabled else None
        try:
            yield partial(self._experts, selected)
        finally:
            self._selected = None

    def _experts(self, selected: dict[int, Tensor], n: int) -> npt.NDArray[np.int64]:
        assert self.shape is not None
        none = torch.zeros_like(next(iter(selected.values())))
        stacked = torch.stack([selected.get(layer, none) for layer in range(self.shape.layers)], 1).cpu().numpy()
        experts: npt.NDArray[np.int64] = stacked.reshape(n, -1, self.shape.layers, self.shape.experts_per_token)
        return experts

    def _on_output(self, layer: int, _gate: Any, _inputs: Any, output: Any) -> None:
        if self._selected is not None:
            self._selected[layer] = require_routing(output)[2]
