"""What the policy is trained on: one sample."""

from __future__ import annotations

from dataclasses import dataclass

from shared.columns import I32, length


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to train on."""

    prompt: bytes
    """int32 column of token ids."""
    completion: bytes
    """int32 column of token ids; the loss is on these, or on those of them that are `trained`."""
    logprobs: bytes
    """float32 column: log-probability of each completion token when it was drawn."""
    advantage: float
    """Of every token, or with `advantages` of none; for a pair's completion, what its log-likelihood is weighed by."""
    proximal: bytes = b""
    """float32 column: its log-probability under the weights that the step began with; empty where those are the ones
    being trained, or nobody asks. All rows of one micro-batch have it, or none; so with the columns below."""
    reference: bytes = b""
    """float32 column: its log-probability under the starting weights, where these were asked already."""
    advantages: bytes = b""
    """float32 column: the advantage of each token, by a critic."""
    values: bytes = b""
    """float32 column: what the critic expected before each token when the step began."""
    returns: bytes = b""
    """float32 column: what it should have expected."""
    trained: bytes = b""
    """uint8 column beside `completion`: 1 for each token that the loss is on, which all columns above are about; empty
    where it is on all. The others are what an environment said."""

    @property
    def n_tokens(self) -> int:
        """Prompt and completion together."""
        return length(self.prompt, I32) + length(self.completion, I32)

    @property
    def n_trained(self) -> int:
        """Tokens that the loss is on, at least one."""
        return sum(self.trained) if self.trained else length(self.completion, I32)
