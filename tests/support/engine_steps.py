"""Training steps that the tests of several engines share."""

from __future__ import annotations

from rlboost.services.trainer.ports.engine import PolicyEngine
from tests.support.losses import clipped_loss
from tests.support.training_rows import rows

LOSS = clipped_loss(0.2, 0.28)


RATE = 1e-2


def train(engine: PolicyEngine, seed: int) -> float:
    engine.accumulate([rows(seed=seed)], LOSS)
    return engine.step(RATE)
