"""The routers of experts of one rank: weighs their load-balancing loss, and observes how evenly they spread tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.torch.routing import Balance, layer_balance
from rlboost.services.trainer.domain import sums


class Routers:
    """The routers of one rank's layers; none in a dense model."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        """Register a hook on each router of `chunk`."""
        self._routers: list[Any] = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._totals: dict[str, float] | None = None
        self._factors: deque[float | None] = deque()
        """The factor of the load-balancing loss of each pass with gradients through a router to come; None: a pass of
        dummy tokens."""
        self._counts = True
        """False during a pass of dummy tokens."""
        for router in self._routers:
            router.register_forward_pre_hook(self._set_coefficient)
            router.register_forward_hook(self._observe)
            # megatron-core computes the loss in training mode only; the rest of the model stays in evaluation mode.
            router.training = router.config.moe_router_load_balancing_type == "aux_loss"

    def set_loss_factor(self, factor: float | None) -> None:
        """Set the factor of the load-balancing loss per token of the next micro-batch, at the scale of transformers.

        None leaves a micro-batch of dummy tokens out of loss and sums.
        """
        if self._totals is not None:
            self._factors.extend([factor] * len(self._routers))

    @contextmanager
    def observed(self) -> Iterator[dict[str, float]]:
        """Yield a dictionary that gets the sums of the forward passes within the context, see `domain.sums`."""
        self._totals = {}
        try:
            yield self._totals
        finally:
            self._totals = None
            self._factors.clear()

    def _set_coefficient(self, router: Any, _inputs: tuple[Tensor, ...]) -> None:
        # Where layers are recomputed, only the second pass has gradients. Micro-batches go backward in forward order.
        if self._totals is None or not torch.is_grad_enabled():
            return
        # megatron-core sums over layers, divides by the experts per token, and multiplies by this rank's tokens.
        config, tensor = router.config, parallel_state.get_tensor_model_parallel_world_size()
        factor = self._factors.popleft()
        self._counts = factor is not None
        config.moe_aux_loss_coeff = (factor or 0.0) * config.moe_router_topk / config.num_layers * tensor

    def _observe(self, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        if self._totals is None or not self._counts or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            logits = router.gating(inputs[0]).flatten(0, -2).float()
            counted = torch.stack([torch.softmax(logits, -1).sum(0), output[1].sum(0).float()])
            n_tokens = len(logits)
            if router.config.sequence_parallel:
                distributed.all_reduce(counted, group=parallel_state.get_tensor_model_parallel_group())
                n_tokens *= parallel_state.get_tensor_model_parallel_world_size()
            layer = layer_balance(counted[0], counted[1], n_tokens)
        sums.add(self._totals, Balance.of_layers([layer], n_tokens).sums())
