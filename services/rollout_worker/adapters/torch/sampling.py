"""Samples one token per request by inverting the cumulative distribution at a given uniform number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating]


def sample(
    logits: torch.Tensor, temperature: Floats, top_p: Floats, uniform: Floats
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each request.

    Args:
        logits: [n, vocabulary], any float dtype.
        temperature: [n]; 0 selects the most likely token.
        top_p: [n], in (0, 1]: sample from the smallest set of most likely tokens whose probabilities add up to at least
            this. Ignored at temperature 0.
        uniform: [n], in [0, 1).

    Returns:
        Tokens [n] (int64), and the log-probability [n] (float32) of each under the distribution it was sampled from; at
        temperature 0 under the model's own. If the logits are not numbers, neither is the log-probability.

    """
    logits = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        logits = logits / _column(np.where(greedy, 1, temperature), logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    narrowed = np.flatnonzero((top_p < 1) & ~greedy)
    if narrowed.size:
        indices = torch.from_numpy(narrowed).to(logits.device)
        logprobs[indices] = _nucleus(logprobs[indices], _column(top_p[narrowed], logits))
    # float64: over a large vocabulary, the rounding error of a float32 sum would bias the tail.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    # right=True: the first entry strictly above the target, which is never one of probability zero.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(_column(greedy, logits), logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [n, vocabulary] within each nucleus; -inf outside it."""
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ranked.exp().double()
    outside = mass.cumsum(dim=-1) - mass >= top_p
    return torch.log_softmax(logprobs.scatter(1, order, ranked.masked_fill(outside, -torch.inf)), dim=-1)


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
