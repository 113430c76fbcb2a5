"""The user's loss function. It runs in the trainer's process, on the trainer's tensors."""

from __future__ import annotations

from typing import cast

from rlboost.services.trainer.domain.tokens import TokenLoss
from rlboost.shared.user_code.functions import load_user_function


def load_loss(path: str) -> TokenLoss:
    """Return the loss function `module:function`.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take one micro-batch.

    """
    return cast("TokenLoss", load_user_function("algorithm.loss", path, ("batch",)))
