"""The learning rate at each step."""

from __future__ import annotations

from shared.training import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, steps: int) -> float:
    """Return the rate of `step` of `steps`: a linear warm-up from the first step on, times a linear fall by `decay`."""
    warmup = min(1.0, (step + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    return optimizer.lr * warmup * (1.0 - optimizer.decay * step / max(1, steps))
