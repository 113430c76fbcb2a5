"""Learning from completions in the data: the loss of supervised fine-tuning, and a step's row of the run log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlboost.services.trainer.domain.loss.function import TokenBatch, routing_metrics
from rlboost.services.trainer.domain.loss.preference import pair_metrics, score_metrics

if TYPE_CHECKING:
    from torch import Tensor

_MAX_NATS = 700.0
"""Above it a perplexity overflows a float."""


def sft_loss(batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
    """Return the summed cross entropy of the completions' tokens, and the sums; a `LossFn`.

    The divisor is the number of tokens, so an update's loss is the mean over all tokens of its step, independent of
    micro-batches. Prompts have no loss.
    """
    total = -batch.logprobs.sum()
    n_tokens = float(sum(batch.lengths))
    return total, {"loss": float(total.detach()), "tokens": n_tokens, "divisor": n_tokens}


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token."""
    return math.exp(min(loss, _MAX_NATS))


@dataclass(frozen=True, slots=True)
class OfflineStep:
    """The results of one step."""

    sums: Mapping[str, float]
    """The loss function's sums over all micro-batches, and those of pairs."""
    lengths: Sequence[int]
    """Number of tokens of each completion."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    train_s: float
    device_wait_s: float | None = None
    """See `Durations`."""

    def metrics(self) -> dict[str, float]:
        """Return the step's row of the run log."""
        loss, n_tokens = self.sums["loss"] / self.sums["divisor"], float(sum(self.lengths))
        step_s = self.train_s + (self.device_wait_s or 0.0)
        return {
            "loss": loss,
            **(pair_metrics(self.sums) or score_metrics(self.sums) or {"perplexity": perplexity(loss)}),
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "tokens/trained": n_tokens,
            "completions/mean_length": n_tokens / len(self.lengths),
            "completions/max_length": float(max(self.lengths)),
            "time/step_s": step_s,
            "time/train_s": self.train_s,
            **({} if self.device_wait_s is None else {"time/device_wait_s": self.device_wait_s}),
            "perf/tokens_per_s": n_tokens / step_s if step_s else 0.0,
            **routing_metrics(self.sums),
        }
