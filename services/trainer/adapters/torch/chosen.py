"""Log-probabilities of given tokens, and their gradient, without a second copy of the logits.

Over a large vocabulary logits are most of what an update holds: 151,936 of them a token, against a hidden state of
some thousand numbers. What autograd would keep of a division, a conversion and a log-softmax is three more of them in
float32, so the gradient is computed here, from the logits themselves and a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_AT_ONCE = 1 << 26
"""Logits that are float32 at a time: 256 MiB."""


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each row's token, float32 [rows].

    Args:
        logits: [rows, vocabulary], of any float dtype, in which their gradient is, too; sums are in float32.
        tokens: int64 [rows].
        temperature: of the distribution; logits are divided by it.

    """
    chosen: Tensor = _ChosenLogprobs.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]  # torch's own
    return chosen


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        return torch.cat(
            [
                -functional.cross_entropy(_scaled(of, temperature), at, reduction="none")
                for of, at in _few_rows_each(logits, tokens)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        found = torch.empty_like(logits)
        weights = gradients[0] / ctx.temperature
        for of, at, weight, into in _few_rows_each(logits, tokens, weights, found):
            # d log p(token) / d logits = (1 at the token, else 0) - p
            p = torch.softmax(_scaled(of, ctx.temperature), -1).mul_(-weight[:, None])
            into.copy_(p.scatter_add_(1, at[:, None], weight[:, None]))
        return found, None, None


def _few_rows_each(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all, as many as of the logits may be float32 at a time."""
    n = max(1, _AT_ONCE // logits.shape[-1])
    return zip(*(torch.split(part, n) for part in (logits, *others)), strict=True)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature
