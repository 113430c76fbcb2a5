"""Log-probabilities of selected tokens and their gradient, without a second copy of the logits.

With a large vocabulary the logits dominate an update's memory: 151,936 per token, against a hidden state of a few
thousand numbers. Autograd would save three more such tensors in float32 for the division, the conversion and the
log-softmax. So this module computes the gradient from the logits themselves, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlboost.shared.model.logit_limits import CHUNK_LOGITS


def selected_logprobs(logits: Tensor, tokens: Tensor, temperature: float, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Return the log-probability of each row's token, float32 [rows].

    Args:
        logits: [rows, vocabulary], of any float dtype, which is also their gradient's; sums are in float32.
        tokens: int64 [rows].
        temperature: divides the logits.
        chunk_logits: logits that are converted to float32 at a time; at least one row is.

    """
    result = _SelectedLogprobs.apply(logits, tokens, temperature, chunk_logits)  # type: ignore[no-untyped-call]  # torch's
    logprobs: Tensor = result
    return logprobs


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, chunk_logits: int) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        return torch.cat(
            [
                -functional.cross_entropy(_scaled(rows, temperature), targets, reduction="none")
                for rows, targets in _row_chunks(chunk_logits, logits, tokens)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens = ctx.saved_tensors
        result = torch.empty_like(logits)
        weights = gradients[0] / ctx.temperature
        for rows, targets, weight, out in _row_chunks(ctx.chunk_logits, logits, tokens, weights, result):
            # d log p(token) / d logits = (1 at the token, else 0) - p
            p = torch.softmax(_scaled(rows, ctx.temperature), -1).mul_(-weight[:, None])
            out.copy_(p.scatter_add_(1, targets[:, None], weight[:, None]))
        return result, None, None, None


def _row_chunks(chunk_logits: int, logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all tensors, in chunks of at most `chunk_logits` logits."""
    n = max(1, chunk_logits // logits.shape[-1])
    return zip(*(torch.split(tensor, n) for tensor in (logits, *others)), strict=True)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature
