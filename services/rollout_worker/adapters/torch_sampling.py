"""Draw one token per row by inverting the cumulative distribution at one given uniform number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating]


def draw(
    logits: torch.Tensor, temperature: Floats, top_p: Floats, uniform: Floats
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row.

    Args:
        logits: [n, vocabulary], any float dtype.
        temperature: [n]; 0 takes the most likely token.
        top_p: [n], in (0, 1]: draw from the smallest set of most likely tokens whose probabilities add up to at least
            this. Ignored where the temperature is 0.
        uniform: [n], in [0, 1).

    Returns:
        Tokens [n] (int64), and the log-probability [n] (float32) of each under the distribution it was drawn from; at
        temperature 0 under the model's own. A row whose logits are not numbers has a log-probability that is not one.

    """
    logits = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        logits = logits / _column(np.where(greedy, 1, temperature), logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    narrowed = np.flatnonzero((top_p < 1) & ~greedy)
    if narrowed.size:
        rows = torch.from_numpy(narrowed).to(logits.device)
        logprobs[rows] = _nucleus(logprobs[rows], _column(top_p[narrowed], logits))
    # float64: over a large vocabulary the rounding of a float32 sum would be seen in the tail.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    # right=True: the first entry strictly above the target, which is never one of probability zero.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(_column(greedy, logits), logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [n, vocabulary] within each row's nucleus; -inf outside it."""
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ranked.exp().double()
    outside = mass.cumsum(dim=-1) - mass >= top_p
    return torch.log_softmax(logprobs.scatter(1, order, ranked.masked_fill(outside, -torch.inf)), dim=-1)


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
