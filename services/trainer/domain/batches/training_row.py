"""One row of a training batch: a sample with its advantage."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost.shared.wire.columns import I32, length


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sample to train on."""

    prompt: bytes
    """int32 column of token ids."""
    completion: bytes
    """int32 column of token ids; `loss_mask` selects those with a loss."""
    logprobs: bytes
    """float32 column: log-probability of each loss token when it was generated."""
    advantage: float
    """Of every token, unless `advantages` is set; for a preference pair, the weight of the log-likelihood. While rows
    are built, the reward."""
    proximal: bytes = b""
    """float32 column: log-probability of each loss token under the weights at the start of the step; empty if these are
    the current weights, or not needed. Either all rows of a micro-batch have it or none, as with the columns below."""
    reference: bytes = b""
    """float32 column: log-probability of each loss token under the initial weights, if already computed."""
    advantages: bytes = b""
    """float32 column: advantage of each loss token, with a critic."""
    values: bytes = b""
    """float32 column: the critic's value before each loss token, at the start of the step."""
    returns: bytes = b""
    """float32 column: the critic's target at each loss token."""
    loss_mask: bytes = b""
    """uint8 column aligned with `completion`: 1 for a token with a loss, 0 for a token of an environment; empty if all
    tokens have a loss. The float32 columns have one entry per loss token."""
    routed_experts: bytes = b""
    """Column of `wire.routed_experts` with an entry per loss token, which the router replays; empty: not known."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return length(self.prompt, I32) + length(self.completion, I32)

    @property
    def n_loss_tokens(self) -> int:
        """Number of tokens with a loss, at least one."""
        return sum(self.loss_mask) if self.loss_mask else length(self.completion, I32)
