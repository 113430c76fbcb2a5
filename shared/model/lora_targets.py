"""Checks `lora.targets` against the names and shapes of a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec

_WEIGHT = ".weight"


def check_targets(spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that each target matches a layer as PEFT matches names: the whole name, or its last components.

    Args:
        spec: the adapter's section of the job file.
        shapes: the shapes of the model's tensors, by Hugging Face name.

    Raises:
        ConfigError: a target matches none; the text lists the layers.

    """
    if isinstance(spec.targets, str):
        return
    layers = [
        name.removesuffix(_WEIGHT) for name, shape in shapes.items() if name.endswith(_WEIGHT) and len(shape) == 2
    ]
    for target in spec.targets:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            raise ConfigError(
                f"lora.targets: the model has no layer {target!r}, but {known}: name some of these, or all-linear"
            )
