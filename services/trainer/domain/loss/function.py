"""A loss function: its input, one micro-batch as columns, and its sums, which add up; and the plainest, `sft_loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Concatenated completions; every column is float32, [tokens], with one entry per loss token."""

    logprobs: Tensor
    """Log-probabilities under the weights being trained; with `entropies` the only column with a gradient."""
    sampled: Tensor
    """Log-probabilities of the same tokens, reported by the inference engine that generated them."""
    advantages: Tensor
    """Advantage of each token; equal for all tokens of a completion, unless the job has a critic."""
    lengths: tuple[int, ...]
    """Number of tokens of each completion, above 0; their sum is the length of the columns."""
    proximal: Tensor | None = None
    """Log-probabilities under the weights at the start of the step; None if not needed, or if these are the current
    weights."""
    reference: Tensor | None = None
    """Log-probabilities under the job's initial weights; None if not needed."""
    entropies: Tensor | None = None
    """Entropy of the whole distribution that each token is from, under the weights being trained, in nats; None if not
    needed."""


LossFn = Callable[[TokenBatch], tuple["Tensor", dict[str, float]]]
"""A micro-batch -> its summed loss, and sums that `add_sums` adds up. One of these, `divisor`, divides the accumulated
gradients of an update."""

TokenLoss = Callable[[TokenBatch], "Tensor"]
"""`algorithm.loss`: a micro-batch -> the loss of each token, before weights and aggregation."""


MAX_PREFIX = "max_"
"""Names with this prefix are maxima; all others are sums."""
MISMATCH = "mismatch_kl"
"""Sum of a KL estimate between the engine's log-probabilities of its tokens and the trainer's. Valid only if the
trainer's are computed under the weights at the start of the step."""
ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD = "routed_tokens", "routing_loss", f"{MAX_PREFIX}expert_load"
"""Sums of a mixture of experts: the number of tokens, prompts included; the sum over them of the load-balancing loss of
their micro-batch; the largest load of an expert, 1 where all have the same."""


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add the sums of a micro-batch to `total`."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        elif name.startswith(MAX_PREFIX):
            total[name] = max(total[name], value)
        else:
            total[name] += value


def routing_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a mixture of experts, none for a dense model."""
    if not (n_tokens := sums.get(ROUTED_TOKENS)):
        return {}
    return {"moe/load_balancing_loss": sums[ROUTING_LOSS] / n_tokens, "moe/max_load": sums[EXPERT_LOAD]}


def sft_loss(batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
    """Return the summed cross entropy of the completions' tokens, and the sums; a `LossFn`.

    The divisor is the number of tokens, so an update's loss is the mean over all tokens of its step, independent of
    micro-batches. Prompts have no loss.
    """
    total = -batch.logprobs.sum()
    n_tokens = float(sum(batch.lengths))
    return total, {"loss": float(total.detach()), "tokens": n_tokens, "divisor": n_tokens}
