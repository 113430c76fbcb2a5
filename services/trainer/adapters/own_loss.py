"""The user's loss function. It runs in the trainer's own process: it computes on the trainer's tensors."""

from __future__ import annotations

import importlib
from typing import Any, cast

from services.trainer.domain.tokens import TokenLoss
from shared.errors import ConfigError


def own_loss(path: str) -> TokenLoss:
    """Return the function `module:function`.

    Raises:
        ConfigError: it cannot be imported, or is no function.

    """
    module, _, name = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise ConfigError(
            f"algorithm.loss: {path} cannot be imported: {type(error).__name__}: {error}; start the trainer in a "
            f"folder from which 'import {module}' works, or add that folder to PYTHONPATH"
        ) from error
    if not callable(function):
        raise ConfigError(f"algorithm.loss: {path} is not a function")
    return cast("TokenLoss", function)
