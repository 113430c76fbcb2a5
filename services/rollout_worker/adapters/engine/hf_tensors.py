"""The tensors of a Hugging Face model by its `config.json`: names, shapes, and which are tied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlboost.shared.errors import ConfigError


class HfTensors:
    """The tensors of a causal language model, without their values.

    Args:
        directory: holds `config.json`.
        dtype: what the engine holds them in.

    Raises:
        ConfigError: no causal language model can be built from it.

    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{directory}: no causal language model can be built from its config.json: {error}"
            ) from error
        self.architecture = type(model).__name__
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._first_name: dict[str, str] = {}
        first_names: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            self._first_name[name] = first_names.setdefault(id(tensor), name)

    def names(self) -> list[str]:
        """Return all names; a tied tensor has several."""
        return list(self._tensors)

    def first_name(self, name: str) -> str:
        """Return the first of the names of a tied tensor, under which `checked` yields it."""
        return self._first_name[name]

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape, strides and dtype on device `meta`."""
        return self._tensors[name]

    def checked(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, may_be_partial: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load, tied ones under their first name.

        Raises:
            ConfigError: a tensor is unknown, missing, of the wrong shape, or would be rounded.

        """
        seen: set[str] = set()
        for name, tensor in tensors:
            target_of(name, tensor, self._tensors)
            seen.add(self._first_name[name])
            yield self._first_name[name], tensor
        if not may_be_partial:
            check_nothing_missing([name for name, first in self._first_name.items() if first not in seen])


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
