"""Probability ratios between the current weights and those that generated the tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_ratios(log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return pi / pi_old of each token: PPO, arXiv 1707.06347, equation 6; GRPO and most others."""
    del lengths
    return log_ratios.exp()


def sequence_ratios(log_ratios: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return (pi(y) / pi_old(y)) ** (1 / length) of each completion, at each of its tokens.

    GSPO, arXiv 2507.18071, equation 7. The gradient of one completion's ratio reaches all of its tokens.
    """
    means = torch.stack([part.mean() for part in torch.split(log_ratios, list(lengths))])
    return at_each_token(means.exp(), lengths)


def at_each_token(of_completions: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return the value of each token's completion, [tokens].

    Args:
        of_completions: one value per completion, [completions].
        lengths: tokens of each completion.

    """
    repeats = torch.tensor(lengths, device=of_completions.device)
    return of_completions.repeat_interleave(repeats, output_size=sum(lengths))
