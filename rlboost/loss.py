"""What a custom loss (`algorithm.loss`) imports."""

from __future__ import annotations

from rlboost.services.trainer.domain.loss.function import TokenBatch, TokenLoss

__all__ = ["TokenBatch", "TokenLoss"]
