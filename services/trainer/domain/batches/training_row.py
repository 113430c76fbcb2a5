"""Rows of a batch: a token sequence, and the columns that training it needs."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost.shared.wire.columns import F32, I32, length, pack


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A prompt and its completion: what a forward pass needs."""

    prompt: bytes
    """int32 column of token ids."""
    completion: bytes
    """int32 column of token ids; `loss_mask` selects those with a loss."""
    sampled: bytes = b""
    """float32 column: log-probability of each loss token when it was generated. Forward passes do not read it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow(SequenceRow):
    """A sequence to train on. Of each column after `advantages` all rows of a micro-batch have one, or none."""

    advantages: bytes
    """float32 column: advantage of each loss token; for a preference pair, the weight of its log-likelihood, and empty
    until that is known."""
    proximal: bytes = b""
    """float32 column: log-probability of each loss token under the weights at the start of the step; empty if these are
    the current weights, or not needed."""
    reference: bytes = b""
    """float32 column: log-probability of each loss token under the initial weights, if already computed."""
    values: bytes = b""
    """float32 column: the critic's value before each loss token, at the start of the step."""
    returns: bytes = b""
    """float32 column: the critic's target at each loss token."""

    @classmethod
    def of(cls, row: SequenceRow, advantages: bytes, **columns: bytes) -> TrainingRow:
        """Return a row with these advantages, and with optional columns by name."""
        sequence = (row.prompt, row.completion, row.sampled, row.loss_mask, row.routed_experts)
        return cls(*sequence, advantages=advantages, **columns)


def constant(value: float, row: SequenceRow) -> bytes:
    """Return a float32 column with the same value at each loss token of a row."""
    return pack([value] * row.n_loss_tokens, F32)
