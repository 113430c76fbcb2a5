"""A LoRA adapter (arXiv 2106.09685) on a causal language model, made by PEFT: what is trained, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.lora_targets import check_targets
from shared.training import LoraSpec

_NAME = "default"
"""What PEFT calls an adapter that nobody named."""


class Adapter:
    """The adapter of one model, whose own parameters are frozen from then on.

    It begins as no change at all, the same one for the same seed. Its tensors are float32 whatever the model's are.
    """

    def __init__(self, model: Any, weights: Mapping[str, Tensor], spec: LoraSpec, seed: int) -> None:
        """Put an adapter into `model`, in place.

        Args:
            model: a transformers model.
            weights: its tensors under their Hugging Face names, tied ones once.
            spec: the adapter.
            seed: of its first values, and of its dropout. Sets torch's own generators.

        Raises:
            ConfigError: PEFT is not installed, or `lora.targets` names what cannot have one.

        """
        try:
            import peft  # noqa: PLC0415 - only jobs that train an adapter need it
        except ImportError as error:
            raise ConfigError("elastic.weights: lora needs PEFT: pip install 'rlboost[trainer]'") from error
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            task_type="CAUSAL_LM",
        )
        check_targets(spec, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        try:
            wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.targets: {error}") from error
        self.json = _json_of(config)
        self.tensors: dict[str, Tensor] = {
            name.replace(f".{_NAME}.", "."): tensor
            for name, tensor in wrapped.named_parameters()
            if tensor.requires_grad
        }
        """What is trained, under PEFT's names."""
        self._layers = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        for name, layer in self._layers.items():
            if type(layer.get_base_layer()) is not torch.nn.Linear or name not in weights:
                raise ConfigError(
                    f"lora.targets: {name.removesuffix('.weight')} is no linear layer with weights of its own; name "
                    "others, or all-linear"
                )

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a tensor of the model as it is with the adapter in it, rounded once to its dtype."""
        if name not in self._layers:
            return weight
        with torch.no_grad():
            delta: Tensor = self._layers[name].get_delta_weight(_NAME)
            return (weight.float() + delta).to(weight.dtype)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let dropout drop, meanwhile."""
        dropouts = [layer.lora_dropout for layer in self._layers.values()]
        for dropout in dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in dropouts:
                dropout.eval()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Let the model be as it is below the adapter, meanwhile."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)


def _json_of(config: Any) -> str:
    """Return PEFT's `adapter_config.json`, the same text each time: it keeps the layers' names in a set."""
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return json.dumps({**fields, "inference_mode": True}, sort_keys=True)
