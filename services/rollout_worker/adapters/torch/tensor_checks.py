"""Checks of published tensors against those that an engine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlboost.shared.errors import ConfigError


def target_of(name: str, tensor: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the target tensor that `tensor` is to be loaded into.

    Raises:
        ConfigError: there is none, its shape differs, or its dtype would round the tensor.

    """
    target = targets.get(name)
    if target is None:
        raise ConfigError(f"weights: the model has no tensor {name!r}; it does not match config.json")
    if tensor.shape != target.shape:
        raise ConfigError(f"weights: {name} is {tuple(tensor.shape)}, config.json requires {tuple(target.shape)}")
    if torch.promote_types(tensor.dtype, target.dtype) != target.dtype:
        raise ConfigError(
            f"weights: {name} is {tensor.dtype} and the engine's {target.dtype} would round it; "
            f"set RLBOOST_WORKER_DTYPE to the dtype of the weights, or publish them as {target.dtype}"
        )
    return target


def check_nothing_missing(names: Sequence[str]) -> None:
    """Raise `ConfigError` if there are names of tensors that were not given."""
    if names:
        raise ConfigError(f"weights: {len(names)} tensors are missing, the first is {names[0]!r}")
