"""The user's loss function. It runs in the trainer's process, on the trainer's tensors."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from rlboost.services.trainer.domain.loss.inputs import TokenBatch, TokenLoss
from rlboost.shared.errors import ConfigError
from rlboost.shared.user_code.errors import describe_error
from rlboost.shared.user_code.functions import load_user_function


def load_loss(path: str) -> TokenLoss:
    """Return the loss function `module:function`.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take one micro-batch. The returned function
            raises it if the user's function raises.

    """
    function = load_user_function("algorithm.loss", path, ("batch",))

    def loss(batch: TokenBatch) -> Tensor:
        try:
            return cast("Tensor", function(batch))
        except Exception as error:
            raise ConfigError(f"algorithm.loss: {path} raised {describe_error(error)}") from error

    return loss
