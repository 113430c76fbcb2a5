"""The routers of a mixture of experts: how evenly they spread tokens, and the replay of recorded decisions.

Replay (R3, arXiv 2510.11370) replaces the experts that a router selects by those that the inference engine selected for
the same token. Their weights are still computed from the router's own logits, so that it learns.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlboost.services.trainer.domain.sums import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Balance(NamedTuple):
    """How evenly one forward pass spread its tokens over the experts."""

    loss: Tensor
    """The load-balancing loss of transformers, as the mean over layers: the number of experts x the sum over experts of
    (tokens per token) x (mean probability). At least about the number of experts per token, if balanced."""
    load: Tensor
    """The largest share of routed tokens that one expert got in any layer x the number of experts; 1 if balanced."""
    n_tokens: int

    @classmethod
    def of_layers(cls, layers: list[tuple[Tensor, Tensor]], n_tokens: int) -> Balance:
        """Combine the results of `layer_balance`."""
        losses, loads = zip(*layers, strict=True)
        return cls(torch.stack(losses).mean(), torch.stack(loads).max(), n_tokens)

    def sums(self) -> dict[str, float]:
        """Return what `domain.sums` adds up over micro-batches and ranks."""
        loss, load = torch.stack([self.loss.detach(), self.load]).tolist()
        return {ROUTED_TOKENS: self.n_tokens, ROUTING_LOSS: loss * self.n_tokens, EXPERT_LOAD: load}


def layer_balance(probabilities: Tensor, routed: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return a layer's `loss` and `load` of `Balance`.

    Args:
        probabilities: of each expert, summed over tokens, [experts].
        routed: how often each expert was selected, [experts].
        n_tokens: the number of tokens.

    """
    n_experts = len(routed)
    loss = n_experts * (routed / n_tokens * probabilities / n_tokens).sum()
    return loss, n_experts * routed.max() / routed.sum()


class Replay(NamedTuple):
    """Recorded decisions for some tokens of a forward pass."""

    at: Tensor
    """Indices of the tokens among all tokens of the pass, [n]."""
    experts: Tensor
    """Their experts, [n, layers, experts per token]."""


class Routers:
    """The routers of a transformers model; none in a dense model.

    Each is the `gate` next to the `experts` of a layer, and returns logits, weights and indices of the experts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Register a hook on each router of `model`."""
        layers = [
            (int(match[1]), layer.gate)
            for name, layer in model.named_modules()
            if hasattr(layer, "gate") and hasattr(layer, "experts") and (match := _LAYER.search(name))
        ]
        self._n_tokens: int | None = None
        self._seen: list[tuple[Any, Tensor, Tensor]] = []
        """(router, logits, indices) of the layers of the observed pass."""
        self._replay: Replay | None = None
        for number, gate in layers:
            gate.register_forward_hook(partial(self._on_output, number))

    def begin(self, n_tokens: int, replay: Replay | None = None) -> None:
        """Observe the next forward pass.

        Args:
            n_tokens: how many tokens it has; padding comes after them.
            replay: decisions that replace the routers', also where layers are recomputed in the backward pass.

        """
        self._n_tokens, self._seen, self._replay = n_tokens, [], replay

    def end(self) -> Balance | None:
        """Stop observing, before layers are recomputed in a backward pass; None if the model is dense."""
        (n_tokens, self._n_tokens), (seen, self._seen) = (self._n_tokens, None), (self._seen, [])
        if n_tokens is None or n_tokens <= 0 or not seen:
            return None
        layers = []
        for gate, logits, indices in seen:
            probabilities = _probabilities(gate, logits[:n_tokens]).sum(0)
            chosen = indices[:n_tokens].flatten()
            ones = torch.ones(len(chosen), device=chosen.device)
            routed = torch.zeros_like(probabilities).scatter_add_(0, chosen, ones)
            layers.append(layer_balance(probabilities, routed, n_tokens))
        return Balance.of_layers(layers, n_tokens)

    def _on_output(
        self, layer: int, gate: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _is_known(output):
            return output  # of an untested family
        logits, weights, indices = output
        if self._n_tokens is not None:
            # The balance is computed later: a layer that is recomputed must save the same tensors again.
            self._seen.append((gate, logits, indices))
        if self._replay is None:
            return output
        replayed = indices.index_copy(0, self._replay.at, self._replay.experts[:, layer])
        return logits, weights_of(gate, logits, replayed).to(weights.dtype), replayed


def weights_of(gate: Any, logits: Tensor, indices: Tensor) -> Tensor:
    """Return the weights that a router gives to experts, [tokens, experts per token], float32.

    Args:
        gate: the router.
        logits: its logits, [tokens, experts].
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


def _is_known(output: Any) -> bool:
    """Return True for logits, weights and indices of experts."""
    return isinstance(output, tuple) and [one.is_floating_point() for one in output] == [True, True, False]


def _has_sigmoids(gate: Any) -> bool:
    """Return True for the routers of DeepSeek-V3 and GLM-4.5, which select by sigmoids and a bias."""
    return hasattr(gate, "e_score_correction_bias")
