"""Builds models of transformers from a directory, with or without weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rlboost.services.trainer.adapters.tokens import UNLOADABLE
from rlboost.services.trainer.adapters.torch.layers import EXPERTS
from rlboost.services.trainer.adapters.torch.passes import ValueModel
from rlboost.services.trainer.adapters.torch.ranks import TensorSlice
from rlboost.services.trainer.adapters.torch.tensors import SliceReader
from rlboost.shared.data.vision import FAMILIES, TEXT, has_towers
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.file_names import FileNames, names_in_files
from rlboost.shared.model.folder import HEAD, read_config, read_tensor_shapes


def whole_model(source: Path, attention: str, dtype: torch.dtype, *, scores: bool = False) -> Any:
    """Return the causal language model in a Hugging Face directory, with its weights, on the CPU.

    With `scores` it is a reward model, whose head is random if the directory has a causal language model.

    It is in evaluation mode: with dropout the trained distribution would differ from the sampled one.

    Raises:
        ConfigError: the directory holds no trainable causal language model.

    """
    try:
        model, report = class_of(source, scores=scores).from_pretrained(
            source,
            **_OPTIONS[scores],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            dtype=dtype,
            attn_implementation=implementation_of(source, attention),
            experts_implementation=EXPERTS,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
    require_shapes(source, report["mismatched_keys"])
    if missing := sorted({*report["missing_keys"]} - ({HEAD} if scores else set())):
        raise ConfigError(
            f"model {source}: its files lack {len(missing)} of the weights that its config.json describes, such as "
            f"{missing[0]}, and transformers would take random ones: copy the model again"
        )
    return _with_head(model, source).eval() if scores else model.eval()


def require_shapes(source: Path, shapes: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Check the shapes of weights: of each the name, that in the files, and that by `config.json`.

    Raises:
        ConfigError: names the first that differs.

    """
    if other := sorted((name, [*found], [*described]) for name, found, described in shapes if [*found] != [*described]):
        name, found, described = other[0]
        raise ConfigError(
            f"model {source}: {name} has the shape {found}, but config.json describes {described}: copy the model again"
        )


def implementation_of(source: Path, attention: str) -> str | dict[str, str]:
    """Return the attention of each part of a model: towers for images and sound have transformers' own."""
    config = read_config(source)
    if not has_towers(config):
        return attention
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    return {"": "sdpa", **dict.fromkeys(parts, "sdpa"), TEXT: attention}


def class_of(source: Path, *, scores: bool = False) -> Any:
    """Return transformers' class of the model in a directory: of one with towers, the one that has them, too."""
    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if has_towers(read_config(source)) else AutoModelForCausalLM


def freeze_towers(model: Any, *, all_of_them: bool) -> None:
    """Freeze what a model has besides its language model; of families that get images here, only if asked."""
    if model.config.get_text_config() is model.config or (model.config.model_type in FAMILIES and not all_of_them):
        return
    head = model.get_output_embeddings() or model.score  # of a reward model
    trained = {id(one) for part in (model.get_decoder(), head) for one in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)


def file_names(source: Path, *, scores: bool = False) -> FileNames:
    """Return the names in files of the tensors of the model in a directory, where only the headers are read.

    Raises:
        ConfigError: see `names_in_files` and `empty_model`.

    """
    return names_in_files(empty_model(source, "eager", scores=scores), read_tensor_shapes(source))


_OPTIONS: tuple[dict[str, Any], dict[str, Any]] = {}, {"num_labels": 1}
"""Of language models, and of reward models."""


def classifier_of(source: Path) -> str:
    """Return transformers' class of reward models of the family in a directory.

    Raises:
        ConfigError: there is none.

    """
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if (found := MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)) is None:
        raise ConfigError(
            f"model {source}: transformers has no reward model of the family {config.model_type}: use another, such as "
            "Llama or Qwen"
        )
    return str(found.__name__)


def _with_head(model: Any, source: Path) -> Any:
    """Return a reward model with its head in float32.

    Raises:
        ConfigError: the family's head is not a linear layer `score` without a bias.

    """
    head: Any = getattr(model, "score", None)
    if head is None or getattr(head, "bias", head) is not None:
        raise ConfigError(
            f"model {source}: {type(model).__name__} has no head {HEAD} without a bias: use a model of another family, "
            "such as Llama or Qwen"
        )
    head.float()
    return model


def initial_head(source: Path, seed: int) -> Tensor:
    """Return the head of the reward model in a directory; for a causal language model a random one, as transformers'.

    It depends on the seed and the shape only.
    """
    if (shape := read_tensor_shapes(source).get(HEAD)) is not None:
        with SliceReader(sorted(source.glob("*.safetensors"))) as reader:
            return reader.read(TensorSlice.whole(HEAD, shape)).float()
    config = AutoConfig.from_pretrained(source, local_files_only=True).get_text_config()
    spread: float = getattr(config, "initializer_range", 0.02)
    values = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return spread * values


def whole_critic(source: Path, attention: str) -> ValueModel:
    """Return a critic on the body of the model in a directory, on the CPU, with the names of `empty_critic`.

    Raises:
        ConfigError: the directory holds no model with a hidden size.

    """
    try:
        body: Any = AutoModel.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation=implementation_of(source, attention),
            experts_implementation=EXPERTS,
            local_files_only=True,
        )
        return ValueModel(body, body.base_model_prefix).eval()
    except (*UNLOADABLE, SafetensorError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a critic: {error}") from error


def empty_model(source: Path, attention: str, dtype: torch.dtype = torch.float32, *, scores: bool = False) -> Any:
    """Return a causal language model on the meta device: no rank ever holds whole weights, each reads its own rows.

    Args:
        source: a Hugging Face directory; only its configuration is read.
        attention: the model's `attn_implementation`.
        dtype: that of the parameters.
        scores: return a reward model.

    Raises:
        ConfigError: the directory holds no causal language model.

    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, **_OPTIONS[scores])
        with init_empty_weights(include_buffers=False):
            module: Any = class_of(source, scores=scores).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=implementation_of(source, attention),
                experts_implementation=EXPERTS,
            )
    except UNLOADABLE as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
    module.tie_weights()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return _with_head(module, source).eval() if scores else module.eval()


def empty_critic(source: Path, attention: str) -> ValueModel:
    """Return a critic on the meta device, whose body's parameters have the names of the causal language model's.

    The arguments and errors are those of `empty_model`.
    """
    module = empty_model(source, attention)
    with torch.device("meta"):
        return ValueModel(module.base_model, module.base_model_prefix).eval()
