"""Names of a transformers model's tensors in its files, under which versions are published and engines read them.

transformers renames tensors when it loads and saves them, and computes with all experts of a layer in one parameter
[experts, rows, columns]. The files of most families have a matrix or two for each expert instead.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlboost.shared.data.vision import FAMILIES
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

FileNames = Mapping[str, Sequence[str]]
"""Name in the model -> its name in files; of a parameter of all experts, those of its matrices, expert by expert. A
tensor that it does not have has the same name in both."""

NO_NAMES: FileNames = MappingProxyType({})

_EXPERTS = re.compile(r"\bexperts\.")


def names_in_files(model: Any, stored: Container[str] = ()) -> FileNames:
    """Return how transformers would name the tensors of a model if it saved it.

    Args:
        model: built from its configuration, as on the meta device: one that was loaded has the names of its own files.
        stored: names in the files of its weights, which may be other ones that transformers reads, too, and are kept.

    Raises:
        ConfigError: it would store a tensor in another form than the model has it.

    """
    names: dict[str, Sequence[str]] = {}
    for name, tensor in model.state_dict().items():
        is_of_experts = tensor.ndim == 3 and _EXPERTS.search(name) is not None
        if model.config.model_type in FAMILIES and not is_of_experts:
            continue  # published by their names in the model, which all engines read
        found = _saved_names(model, name, tensor, is_of_experts=is_of_experts)
        if not found:
            raise ConfigError(
                f"model type {model.config.model_type}: transformers stores {name} in another form than it computes "
                "with, which cannot be published: use a model of another family"
            )
        if found[0] not in stored:
            found = next(([one] for one in (name, older_name(found[0])) if one in stored), found)
        if found != [name]:
            names[name] = found
    return names


def older_name(name: str) -> str:
    """Return the name of a tensor in published files of Gemma 3 and LLaVA, whose towers have one component more."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def _saved_names(model: Any, name: str, tensor: Tensor, *, is_of_experts: bool) -> list[str]:
    """Return the names of a tensor in files; empty if they have neither it nor its matrices."""
    import torch  # noqa: PLC0415 - a library of those who load models
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - as above

    if is_of_experts:  # a small one of as many experts, by whose numbers its parts are told apart
        tensor = torch.arange(len(tensor) * 4 * 3).view(-1, 4, 3)
    saved: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    if len(saved) == 1:
        ((file_name, value),) = saved.items()
        return [file_name] if value is tensor else []
    if not is_of_experts or len(saved) % len(tensor):
        return []
    ordered = sorted(saved.items(), key=lambda pair: int(pair[1].flatten()[0]))
    parts = matrices(tensor, len(saved) // len(tensor))
    is_split = all(torch.equal(value, part) for (_, value), part in zip(ordered, parts, strict=True))
    return [file_name for file_name, _ in ordered] if is_split else []


def matrices(tensor: Tensor, n: int) -> list[Tensor]:
    """Return the matrices that are stacked in the rows of each expert of a parameter, `n` in each, as views."""
    return [part for rows in tensor for part in rows.chunk(n)]


def by_file_name(tensors: Mapping[str, Tensor], names: FileNames) -> dict[str, Tensor]:
    """Return tensors of a model by their names in files; those of experts are views."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = names.get(name, (name,))
        parts = [tensor] if len(own) == 1 else matrices(tensor.detach(), len(own) // len(tensor))
        found |= zip(own, parts, strict=True)
    return found
