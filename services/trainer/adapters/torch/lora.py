"""A LoRA adapter (arXiv 2106.09685) on a causal language model, built with PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.model.lora_targets import check_targets
from rlboost.shared.process.extras import pip_install

_NAME = "default"
"""PEFT's name of an unnamed adapter."""


class Adapter:
    """The adapter of one model. Creating it freezes the model's own parameters.

    Its tensors are float32 for any model dtype, and uninitialized: see `initial_values`.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]], spec: LoraSpec) -> None:
        """Add an adapter to `model`, in place.

        Args:
            model: a transformers model, on any device, also torch's meta device.
            shapes: shapes of the model's tensors by their Hugging Face names, tied ones once.
            spec: the adapter's settings.

        Raises:
            ConfigError: PEFT is not installed, or `lora.targets` names modules that cannot have an adapter.

        """
        try:
            import peft  # noqa: PLC0415 - only jobs that train an adapter need it
        except ImportError as error:
            raise ConfigError(f"elastic.weights: lora needs PEFT: {pip_install('trainer')}") from error
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            task_type="CAUSAL_LM",
        )
        check_targets(spec, shapes)
        try:
            self._wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.targets: {error}") from error
        self._model = model
        self.json = _json_of(config)
        self._layers = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        for name, layer in self._layers.items():
            if type(layer.get_base_layer()) is not torch.nn.Linear or name not in shapes:
                raise ConfigError(
                    f"lora.targets: {name.removesuffix('.weight')} is not a linear layer with weights of its own: name "
                    "other modules, or all-linear"
                )
        model.eval()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors, by PEFT's names."""
        return {
            name.replace(f".{_NAME}.", "."): tensor
            for name, tensor in self._wrapped.named_parameters()
            if tensor.requires_grad
        }

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The model's own parameters, by their Hugging Face names."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._model.named_parameters()
            if not tensor.requires_grad
        }

    def initial_values(self, seed: int) -> dict[str, Tensor]:
        """Return the values that training starts from, on the CPU: those of PEFT, which are the identity.

        They depend on the seed and the shapes only, not on the device or on how the tensors are sharded.
        """
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros(tensor.shape) for name, tensor in self.tensors.items()}
        for name, value in values.items():
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        return values

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a tensor of the model with the adapter merged in, rounded once to its dtype."""
        if name not in self._layers:
            return weight
        with torch.no_grad():
            delta: Tensor = self._layers[name].get_delta_weight(_NAME)
            return (weight.float() + delta).to(weight.dtype)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enable the adapter's dropout within the context."""
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
        """Disable the adapter within the context, which computes no gradients."""
        self._disable(True)
        try:
            yield
        finally:
            self._disable(False)

    def _disable(self, disabled: bool) -> None:
        for layer in self._layers.values():
            # PEFT's `enable_adapters` also changes `requires_grad`, which FSDP2 reads once, in its first forward pass.
            layer._disable_adapters = disabled  # noqa: SLF001 - its property has no setter


def _json_of(config: Any) -> str:
    """Return PEFT's `adapter_config.json`, with sets sorted so that the text is reproducible."""
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return json.dumps({**fields, "inference_mode": True}, sort_keys=True)
