"""Estimators of KL(trained || reference) from tokens that the policy generated: http://joschu.net/blog/kl-approx.html."""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log pi - log ref: its mean is the KL, but as a loss its mean gradient on-policy is 0."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return (log pi - log ref)^2 / 2: never negative, biased; on-policy its gradient is the KL's on average.

    The one of REINFORCE++ with a baseline, arXiv 2501.03262.
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ref / pi - 1 - log(ref / pi): never negative, and its mean is the KL. GRPO's, arXiv 2402.03300, eq. 4."""
    log_ratio = reference - logprobs
    return log_ratio.exp() - 1.0 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
