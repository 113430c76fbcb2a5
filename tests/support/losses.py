"""Policy losses of tests and benchmarks, where no job file names one."""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor

from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.loss.policy import PolicyLoss


def clipped_loss(clip_low: float, clip_high: float) -> PolicyLoss:
    """Return PPO's clip with the mean over tokens, for tokens of the weights at the start of the step."""
    return PolicyLoss(clip="ppo", clip_low=clip_low, clip_high=clip_high)


def decoupled_loss(clip_low: float, clip_high: float, tis_cap: float | None) -> PolicyLoss:
    """Return the same for tokens of older weights: the decoupled objective of AReaL.

    See arXiv 2505.24298, and its source, arXiv 2110.00641. The clipped ratio is to the *proximal* policy, the weights
    at the start of the step. An importance weight without gradient, min(proximal / sampled, `tis_cap`), corrects for
    the change of weights between sampling and that start; None: no importance weight.
    """
    return PolicyLoss(clip="ppo", clip_low=clip_low, clip_high=clip_high, decoupled=True, tis_cap=tis_cap)


def segfault(batch: TokenBatch) -> Tensor:
    """End the trainer as a fault in a library does."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return batch.logprobs.sum()


def hang(batch: TokenBatch) -> Tensor:
    """Compute for longer than any test lasts."""
    time.sleep(3600)
    return batch.logprobs.sum()
