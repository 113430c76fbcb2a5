"""The sums that a loss function returns with each micro-batch: their names, and how those of several add up."""

from __future__ import annotations

from collections.abc import Mapping

MAX_PREFIX = "max_"
"""Names with this prefix are maxima; all others are sums."""
MISMATCH = "mismatch_kl"
"""Sum of a KL estimate between the engine's log-probabilities of its tokens and the trainer's. Valid only if the
trainer's are computed under the weights at the start of the step."""
ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD = "routed_tokens", "routing_loss", f"{MAX_PREFIX}expert_load"
"""Sums of a mixture of experts: the number of tokens, prompts included; the sum over them of the load-balancing loss of
their micro-batch; the largest load of an expert, 1 where all have the same."""


def add(total: dict[str, float], part: Mapping[str, float]) -> None:
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
