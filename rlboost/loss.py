"""What a custom loss (`algorithm.loss`) imports."""

from __future__ import annotations

from rlboost.services.trainer.domain.loss.inputs import TokenBatch, TokenLoss

__all__ = ["TokenBatch", "TokenLoss"]
