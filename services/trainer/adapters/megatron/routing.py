"""The routers of experts of one rank: their load-balancing loss, how evenly they spread tokens, and router replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.torch.routing import Balance, Replay, layer_balance, times_selected
from rlboost.services.trainer.domain.loss import sums


class RoutedBatch(NamedTuple):
    """What routers need to know of a micro-batch."""

    loss_factor: float | None
    """Weight of the load-balancing loss per token, on transformers' scale; None for dummy tokens, which count in no
    loss and no sum."""
    replay: Replay | None = None
    """Recorded experts of this rank's tokens."""


class _ReplayedTopK:
    """Takes the place of megatron-core's `RouterReplay`, which replaces the experts of all tokens or of none."""

    def __init__(self, layer: int) -> None:
        """Select experts for the layer with this number; the model's first is 0."""
        self._layer = layer
        self.replay: Replay | None = None
        self.selected: Tensor | None = None
        """The router's own selection in the newest pass, whatever was replayed: int64 [tokens, experts per token]."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of each token's experts, and the experts, [tokens, `topk`] each.

        Args:
            scores: scores of all experts, [tokens, experts].
            topk: experts per token.
            num_groups: groups of experts, if selection is limited to some groups.
            group_topk: groups per token.
            default_compute_topk: the router's own selection.

        """
        selected_scores, self.selected = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.replay is None:
            return selected_scores, self.selected
        indices = self.selected.index_copy(0, self.replay.at, self.replay.experts[:, self._layer])
        return scores.gather(1, indices), indices


class Routers:
    """The routers of one rank's layers; none in a dense model."""

    def __init__(self, chunk: torch.nn.Module, *, replays: bool = False) -> None:
        """Register hooks on each router of `chunk`; `replays`: whether micro-batches have recorded experts."""
        self._routers: list[Any] = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._totals: dict[str, float] | None = None
        self._batch = RoutedBatch(None)
        """The micro-batch of the next pass without gradients."""
        self._batches: deque[RoutedBatch] = deque()
        """The micro-batch of each pass with gradients through a router to come."""
        self._counts = True
        """False during a pass of dummy tokens."""
        for router in self._routers:
            if replays:
                router.router_replay = _ReplayedTopK(router.layer_number - 1)
            router.register_forward_pre_hook(self._on_input)
            router.register_forward_hook(self._observe)
            # megatron-core computes the loss in training mode only; the rest of the model stays in evaluation mode.
            router.training = router.config.moe_router_load_balancing_type == "aux_loss"

    def begin(self, batch: RoutedBatch) -> None:
        """Set the micro-batch of the next forward pass, and of its recomputation in the backward pass."""
        self._batch = batch
        if self._totals is not None:
            self._batches.extend([batch] * len(self._routers))

    @contextmanager
    def observed(self) -> Iterator[dict[str, float]]:
        """Yield a dictionary that gets the sums of the forward passes within the context, see `domain.loss.sums`."""
        self._totals = {}
        try:
            yield self._totals
        finally:
            self._totals = None
            self._batches.clear()

    def _on_input(self, router: Any, _inputs: tuple[Tensor, ...]) -> None:
        # Where layers are recomputed, only the second pass has gradients. Micro-batches go backward in forward order.
        has_gradients = self._totals is not None and torch.is_grad_enabled()
        batch = self._batches.popleft() if has_gradients else self._batch
        if router.router_replay is not None:
            router.router_replay.replay = batch.replay
        if not has_gradients:
            return
        # megatron-core sums over layers, divides by the experts per token, and multiplies by this rank's tokens.
        config, tensor = router.config, parallel_state.get_tensor_model_parallel_world_size()
        self._counts = batch.loss_factor is not None
        config.moe_aux_loss_coeff = (batch.loss_factor or 0.0) * config.moe_router_topk / config.num_layers * tensor

    def _observe(self, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        if self._totals is None or not self._counts or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            logits = router.gating(inputs[0]).flatten(0, -2).float()
            replayed = router.router_replay
            routed = output[1].sum(0) if replayed is None else times_selected(replayed.selected, logits.shape[-1])
            counted = torch.stack([torch.softmax(logits, -1).sum(0), routed.float()])
            n_tokens = len(logits)
            if router.config.sequence_parallel:
                distributed.all_reduce(counted, group=parallel_state.get_tensor_model_parallel_group())
                n_tokens *= parallel_state.get_tensor_model_parallel_world_size()
            layer = layer_balance(counted[0], counted[1], n_tokens)
        sums.add(self._totals, Balance.of_layers([layer], n_tokens).sums())
