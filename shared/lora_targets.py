"""Whether a model has the layers that `lora.targets` names, told from the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import ConfigError
from shared.training import LoraSpec

_WEIGHT = ".weight"


def check_targets(spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """See that each target is a layer, as PEFT matches names: the whole name, or its last parts.

    Args:
        spec: the adapter.
        shapes: of the model's tensors, by their Hugging Face names.

    Raises:
        ConfigError: one is not; the text says which there are.

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
