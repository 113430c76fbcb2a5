"""The learning rate at each step."""

from __future__ import annotations

from rlboost.shared.job.training import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, steps: int) -> float:
    """Return the learning rate of `step`: a linear warm-up times a linear decay by `decay` over `steps`."""
    warmup = min(1.0, (step + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    return optimizer.lr * warmup * (1.0 - optimizer.decay * step / max(1, steps))
