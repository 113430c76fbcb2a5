"""What a backend requires of a model for a job's settings, and what the model's hardware can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rlboost.services.trainer.adapters.tokens import UNLOADABLE
from rlboost.services.trainer.adapters.torch.fsdp import SETTING as FSDP
from rlboost.services.trainer.adapters.torch.layers import (
    CHECKPOINTING,
    Adapter,
    attention_of,
    layers_of,
    require_compilable,
    require_packed,
)
from rlboost.services.trainer.adapters.torch.models import class_of, empty_model, implementation_of, require_shapes
from rlboost.services.trainer.adapters.torch.routing import require_routers
from rlboost.services.trainer.domain.metrics import TrainingHardware, flops_per_token, peak_flops
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.model.file_names import by_file_name, names_in_files
from rlboost.shared.model.folder import count_in_tower, count_parameters, read_config, read_tensor_shapes

# --- What the torch backend and FSDP2 require of a model for a job's settings. They check the same when they load it


CHECKS: dict[str, Callable[[Any], object]] = {
    "context_parallel": lambda model: require_packed(model.config, model.config._attn_implementation),  # noqa: SLF001 - it has no public name
    "data_parallel": partial(layers_of, setting=FSDP),
    "compile": require_compilable,
    "activation_checkpointing": partial(layers_of, setting=CHECKPOINTING),
    "router_aux_loss_coef": require_routers,
    "router_replay": require_routers,
}
"""Key of `trainer` -> raises ConfigError if a transformers model does not support it."""


def require_adaptable(source: Path, model: Any, adapter: LoraSpec) -> None:
    """Check that an adapter can be added to the model in a directory, which this changes.

    Raises:
        ConfigError: PEFT is not installed, or `lora.targets` names modules that cannot have an adapter.

    """
    Adapter(model, adapter, names_in_files(model, read_tensor_shapes(source)))


def model_without_weights(source: Path) -> Any:
    """Return the model in a Hugging Face directory on the meta device; None if it cannot be built."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        attention = attention_of(config, warns=False)
        with torch.device("meta"):
            return class_of(source).from_config(config, attn_implementation=implementation_of(source, attention))
    except Exception:  # noqa: BLE001 - loading the model reports what is wrong with it
        return None


def require_described_weights(source: Path, *, scores: bool) -> None:
    """Check the shapes of a directory's weights, by the headers of its files, against its `config.json`.

    Args:
        source: the model's directory.
        scores: the job trains a reward model.

    Raises:
        ConfigError: they differ, transformers has no such model, or cannot store it as it computes with it.

    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except UNLOADABLE:
        return  # the tokenizer's check says so
    described = empty_model(source, attention_of(config, warns=False), torch.float32, scores=scores)
    stored = read_tensor_shapes(source)
    tensors = by_file_name(described.state_dict(), names_in_files(described, stored))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    require_shapes(source, ((name, found, shapes.get(name, found)) for name, found in stored.items()))


# --- Describes the devices and the model's cost per token, for `perf/mfu` ---------------------------------------------


def hardware_of(spec: JobSpec, model: Path, device: str) -> TrainingHardware:
    """Return the devices, peak FLOP/s and FLOP per token, as far as known; `device` is torch's name."""
    trainer = spec.trainer
    n_devices = trainer.n_ranks
    peak = None
    if torch.device(device).type == "cuda" and torch.cuda.is_available():  # else the GPUs are on other machines
        peak = peak_flops(torch.cuda.get_device_name(device), trainer.dtype)
    if peak is None:
        return TrainingHardware(n_devices)
    try:
        dense = not is_mixture(read_config(model))
        n = count_parameters(model) - count_in_tower(model)  # patches are no tokens
        flops = flops_per_token(n, frozen=spec.adapter is not None) if dense else 0.0
    except ConfigError:
        flops = 0.0
    return TrainingHardware(n_devices, flops, peak)
