"""The routers of a mixture of experts: how evenly they spread tokens, and the replay of recorded decisions.

Replay (R3, arXiv 2510.11370) replaces the experts that a router selects by those that the inference engine selected for
the same token. Their weights are still computed from the router's own logits, so that it learns.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlboost.services.trainer.domain.loss.function import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.experts import is_routing, require_routing, routers_of

_TOLERANCE = 0.02
"""Relative difference of weights that rounding to bfloat16 explains."""


class Balance(NamedTuple):
    """How evenly one forward pass spread its tokens over the experts."""

    loss: Tensor
    """The load-balancing loss of transformers, the mean over layers of E * sum_e f_e * p_e. E is the number of experts,
    f_e the tokens routed to expert e per token, p_e the router's mean probability of e. About the number of experts per
    token if balanced."""
    load: Tensor
    """E * max_e f_e / sum_e f_e of the layer where it is largest; 1 if balanced."""
    n_tokens: int

    @classmethod
    def of_layers(cls, layers: list[tuple[Tensor, Tensor]], n_tokens: int) -> Balance:
        """Combine the results of `layer_balance`."""
        losses, loads = zip(*layers, strict=True)
        return cls(torch.stack(losses).mean(), torch.stack(loads).max(), n_tokens)

    def sums(self) -> dict[str, float]:
        """Return what `domain.loss.function` adds up over micro-batches and ranks."""
        loss, load = torch.stack([self.loss.detach(), self.load]).tolist()
        return {ROUTED_TOKENS: self.n_tokens, ROUTING_LOSS: loss * self.n_tokens, EXPERT_LOAD: load}


def layer_balance(probabilities: Tensor, routed: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return a layer's `loss` and `load` of `Balance`.

    Args:
        probabilities: probabilities of each expert, summed over tokens, [experts].
        routed: how often each expert was selected, [experts].
        n_tokens: the number of tokens.

    """
    n_experts = len(routed)
    loss = n_experts * (routed / n_tokens * probabilities / n_tokens).sum()
    return loss, n_experts * routed.max() / routed.sum()


def times_selected(indices: Tensor, n_experts: int) -> Tensor:
    """Return how often each expert was selected, float32 [experts], from the experts of each token."""
    chosen = indices.flatten()
    counts = torch.zeros(n_experts, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones(len(chosen), device=chosen.device))


class Replay(NamedTuple):
    """Recorded decisions for some tokens of a forward pass."""

    at: Tensor
    """Indices of the tokens among all tokens of the pass, [n]."""
    experts: Tensor
    """Their experts, [n, layers, experts per token]."""


class Routers:
    """The routers of a transformers model; none in a dense model."""

    def __init__(self, model: torch.nn.Module, *, required: bool = False) -> None:
        """Register a hook on each router of `model`.

        Args:
            model: a transformers model.
            required: whether the job needs the routers. Then a pass raises ConfigError if their output is unknown, or
                if their weights are not those of `weights_of`. Else such routers are not observed.

        Raises:
            ConfigError: there are none, and they are required.

        """
        layers = require_routers(model) if required else routers_of(model)
        self._unchecked = {gate for _, gate in layers} if required else set()
        self._required = required
        self._n_tokens: int | None = None
        self._seen: list[tuple[Any, Tensor, Tensor]] = []
        """(router, logits, indices) of the layers of the observed pass."""
        self._replay: Replay | None = None
        for number, gate in layers:
            gate.register_forward_hook(partial(self._on_output, number))

    def begin(self, n_tokens: int | None, replay: Replay | None = None) -> None:
        """Observe the next forward pass.

        Args:
            n_tokens: how many tokens it has; padding comes after them. None if its balance is not needed.
            replay: decisions that replace the routers', also where layers are recomputed in the backward pass.

        """
        self._n_tokens, self._seen, self._replay = n_tokens, [], replay

    def end(self) -> Balance | None:
        """Stop observing, before layers are recomputed in a backward pass; None without routers or `n_tokens`."""
        (n_tokens, self._n_tokens), (seen, self._seen) = (self._n_tokens, None), (self._seen, [])
        if n_tokens is None or n_tokens <= 0 or not seen:
            return None
        layers = []
        for gate, logits, indices in seen:
            probabilities = _probabilities(gate, logits[:n_tokens]).sum(0)
            routed = times_selected(indices[:n_tokens], len(probabilities))
            layers.append(layer_balance(probabilities, routed, n_tokens))
        return Balance.of_layers(layers, n_tokens)

    def _on_output(
        self, layer: int, gate: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._required and not is_routing(output):
            return output
        logits, weights, indices = require_routing(output)
        if gate in self._unchecked:
            _check_weights(gate, logits, weights, indices)
            self._unchecked.discard(gate)
        if self._n_tokens is not None:
            # The balance is computed later: a layer that is recomputed must save the same tensors again.
            self._seen.append((gate, logits, indices))
        if self._replay is None:
            return output
        replayed = indices.index_copy(0, self._replay.at, self._replay.experts[:, layer])
        return logits, weights_of(gate, logits, replayed).to(weights.dtype), replayed


def require_routers(model: Any) -> list[tuple[int, Any]]:
    """Return (layer, router) of a transformers model. The model may be on the meta device.

    Raises:
        ConfigError: there are none.

    """
    if layers := routers_of(model):
        return layers
    raise ConfigError(
        f"{type(model).__name__} has no routers that are known (a gate next to experts): remove "
        "trainer.router_aux_loss_coef and trainer.router_replay"
    )


def weights_of(gate: Any, logits: Tensor, indices: Tensor) -> Tensor:
    """Return the weights that a router gives to experts, [tokens, experts per token], float32.

    Args:
        gate: the router.
        logits: the router's logits, [tokens, experts].
        indices: the experts of each token, [tokens, experts per token].

    """
    weights = _scores(gate, logits).gather(1, indices)
    if getattr(gate, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if _has_sigmoids(gate) else 0.0))
    return weights * getattr(gate, "routed_scaling_factor", 1.0)


def _probabilities(gate: Any, logits: Tensor) -> Tensor:
    # DeepSeek-V3's own loss normalizes its sigmoids (arXiv 2412.19437, equation 19).
    scores = _scores(gate, logits)
    return scores / scores.sum(-1, keepdim=True) if _has_sigmoids(gate) else scores


def _scores(gate: Any, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits.float()) if _has_sigmoids(gate) else torch.softmax(logits.float(), -1)


@torch.no_grad()
def _check_weights(gate: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> None:
    own = weights_of(gate, logits, indices)
    if not torch.allclose(own, weights.float(), rtol=_TOLERANCE, atol=_TOLERANCE * float(own.max())):
        raise ConfigError(
            f"the weights that {type(gate).__name__} gives to experts are not computed in a way that is known: remove "
            "trainer.router_replay and trainer.router_aux_loss_coef, or install the release of transformers that "
            "constraints.txt names"
        )


def _has_sigmoids(gate: Any) -> bool:
    """Return True for the routers of DeepSeek-V3 and GLM-4.5, which select by sigmoids and a bias."""
    return hasattr(gate, "e_score_correction_bias")
