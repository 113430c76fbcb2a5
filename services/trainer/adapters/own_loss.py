"""The user's loss function. It runs in the trainer's own process: it computes on the trainer's tensors."""

from __future__ import annotations

from typing import cast

from services.trainer.domain.tokens import TokenLoss
from shared.own_code import own_function


def own_loss(path: str) -> TokenLoss:
    """Return the function `module:function`.

    Raises:
        ConfigError: it cannot be imported, is no function, or does not take one micro-batch.

    """
    return cast("TokenLoss", own_function("algorithm.loss", path, ("batch",)))
