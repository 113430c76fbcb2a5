"""The layers of a transformers model: attention, experts, activation checkpointing, compilation, and LoRA adapters."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlboost.services.trainer.adapters.torch.attention import PACKED, packs_rows
from rlboost.services.trainer.adapters.torch.passes import Packed, model_inputs
from rlboost.shared.data.vision import FAMILIES
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec, check_targets
from rlboost.shared.model.experts import routers_of
from rlboost.shared.model.file_names import FileNames
from rlboost.shared.process.modules import pip_install
from rlboost.shared.weights.lora import config_json_of, wrapped_names

log = structlog.get_logger(__name__)

# --- The layers of a transformers model -------------------------------------------------------------------------------


def layers_of(model: Any, setting: str) -> list[Any]:
    """Return the layers of a transformers model, for a setting that replaces their `forward`.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{setting}: not supported for {type(model).__name__}, whose layers transformers does not mark: remove the "
            "setting"
        )
    return layers


# --- Experts of transformers' models under autocast -------------------------------------------------------------------
# torch's grouped matrix product ignores autocast, so experts with float32 weights would compute in float32 while the
# rest of the model, and the engine that generates, compute in bfloat16.


EXPERTS = "rlboost_autocast"
"""The name under which transformers knows this implementation: a model's `experts_implementation`."""


class _Cast:
    """A module of experts whose parameters are read in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


def autocast_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, computed in autocast's dtype if autocast is enabled.

    Args:
        experts: transformers' module with the parameters of a layer's experts.
        hidden: [tokens, hidden size].
        indices: each token's experts, [tokens, experts per token].
        weights: their weights, [tokens, experts per token].

    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        experts, hidden = _Cast(experts, dtype), hidden.to(dtype)
    result: Tensor = grouped_mm_experts_forward(experts, hidden, indices, weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, autocast_experts)


# --- Activation checkpointing (arXiv 1604.06174): recompute each layer's activations in the backward pass -------------


CHECKPOINTING = "trainer.activation_checkpointing"


def checkpoint_activations(model: Any) -> None:
    """Make each layer of a transformers model save only its input for the backward pass.

    The switch of transformers is not used: it works in training mode only, which also enables dropout. Layers that
    FSDP2 shards are gathered for the recomputation too: its hooks wrap `forward`, and run before a layer's backward
    pass. Dropout that is active in the forward pass must still be active in the backward pass.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    for layer in layers_of(model, CHECKPOINTING):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


# --- torch.compile of a model's layers --------------------------------------------------------------------------------
# Layers of a model share their compiled code. Attention is not compiled: it is computed row by row, so its code would
# depend on the rows of each micro-batch.


COMPILATION = "trainer.compile"


def compile_layers(model: Any, device: str) -> None:
    """Compile each layer of a transformers model. Call it before layers are wrapped otherwise.

    The first micro-batches compile, not this call. The number of tokens is a variable of the code.

    Args:
        model: the model.
        device: `cpu`, `cuda` or a GPU with its number.

    Raises:
        ConfigError: the model or the machine does not support it.

    """
    layers = require_compilable(model)
    _require_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def require_compilable(model: Any) -> list[Any]:
    """Return the layers that `compile_layers` compiles. The model may be on the meta device.

    Raises:
        ConfigError: the model does not support it.

    """
    if routers_of(model) or not packs_rows(model):
        raise ConfigError(
            f"{COMPILATION}: not supported for {type(model).__name__}, whose layers are experts or compute more than "
            "causal attention: remove the setting"
        )
    return layers_of(model, COMPILATION)


def _require_compiler(device: str) -> None:
    """Compile a function of one operation, since torch has no question for it.

    Raises:
        ConfigError: torch cannot compile for this device.

    """
    try:
        torch.compile(_cosine)(torch.zeros(2, device=device))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, of its libraries, or of a missing compiler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{COMPILATION}: torch.compile does not work on this machine ({reason}): install a C++ compiler such as "
            "g++ where the trainer runs, or remove the setting"
        ) from error


def _cosine(value: torch.Tensor) -> torch.Tensor:
    return value.cos()


# --- Chooses the attention implementation that trains a model ---------------------------------------------------------
# It is that of packed rows if they give the same logits as transformers' eager attention, otherwise an implementation
# of transformers. The configuration does not show this: some families pass more to attention (sinks, learned masks) or
# omit row boundaries. So a small random model of the family runs with each candidate.


_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary frequencies that depend on the longest row: of packed rows, on another one."""
_FROM_TRANSFORMERS = ("sdpa", "eager")
"""transformers' implementations, the faster one first; families are defined by `eager`."""
_ROW_LENGTHS = (13, 9)
"""Tokens of each row that is compared. Rows are longer than `_WINDOW`."""
_WINDOW = 4
_HEADS = 4
_SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 97, "vocab_size_per_layer_input": 97}
_TOLERANCE = 1e-3


def attention_of(config: Any, *, warns: bool = True) -> str:
    """Return the attention with which a model is trained: its `attn_implementation`.

    It is `attention.PACKED` if layers mix tokens by causal attention only, and packed rows have the logits of separate
    ones. Recurrent layers, convolutions along the tokens and attention in chunks would mix neighboring rows. A model
    with them computes one row at a time, by transformers' own attention.

    Args:
        config: configuration of a causal language model of transformers.
        warns: log a warning if rows cannot be packed.

    """
    if config.model_type in FAMILIES:
        return PACKED  # as tests of these families show; that of the tower for images is another
    text = config.get_text_config()
    may_pack = _may_pack(text)
    rejected = (
        {} if may_pack else {PACKED: "its layer types, rotary frequencies or code in transformers do not allow it"}
    )
    # The scores of the small model are too low for a cap to show, and sdpa ignores caps.
    own = ["eager"] if getattr(text, "attn_logit_softcapping", None) else [*_FROM_TRANSFORMERS]
    choices = [PACKED, *own] if may_pack else own
    found = _first_matching(config, choices, rejected) or own[0]
    if warns and found != PACKED:
        log.warning("rows_not_packed", model_type=config.model_type, attention=found, reason=rejected[PACKED])
    return found


def require_packed(config: Any, attention: str) -> None:
    """Check that the tokens of a model's micro-batches can be divided over processes.

    Args:
        config: configuration of a causal language model of transformers.
        attention: what `attention_of` returns for it.

    Raises:
        ConfigError: they cannot.

    """
    if attention != PACKED:
        raise ConfigError(
            f"trainer.context_parallel: {config.model_type} has layers that compute more than causal attention, and "
            "cannot be divided along the tokens: set it to 1"
        )


def _may_pack(config: Any) -> bool:
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return bool(
        getattr(model, "_supports_attention_backend", False)
        and not getattr(model, "_is_stateful", False)
        and rope not in _LENGTH_DEPENDENT_ROPE
        and _LAYERS.issuperset(getattr(config, "layer_types", None) or ())
    )


def _small(config: Any) -> Any:
    """Return a configuration of a few layers, one of each type, with few heads of the same size and a short window."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = text  # without the towers for images and sound
    if types := getattr(text, "layer_types", None):
        distinct = list(dict.fromkeys(types))
        text.layer_types = distinct if len(distinct) > 1 else types[:2]
        text.num_hidden_layers = len(text.layer_types)
    else:
        text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(text.sliding_window, _WINDOW)
    heads, key_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    text.hidden_size = _HEADS * (text.hidden_size // heads)
    text.num_attention_heads = _HEADS
    if key_heads:
        text.num_key_value_heads = _HEADS if key_heads == heads else min(key_heads, _HEADS // 2)
    for name, size in _SIZES.items():
        if isinstance(given := getattr(text, name, None), int):
            setattr(text, name, min(given, size))
    if text.pad_token_id is not None:
        text.pad_token_id = 0
    return config


@torch.inference_mode()
def _first_matching(config: Any, choices: Sequence[str], rejected: dict[str, str]) -> str | None:
    """Return the first choice with the logits of `eager`, None if there is none; add the others to `rejected`.

    Args:
        config: configuration of a causal language model of transformers.
        choices: implementations to compare.
        rejected: implementation -> why it was not chosen.

    """
    try:
        model = _random_model(_small(config))
        rows = [torch.arange(n) * 7 % model.get_input_embeddings().num_embeddings for n in _ROW_LENGTHS]
        expected = _separate(model, rows)
    except Exception as error:  # noqa: BLE001 - of a family's own code, at sizes that it may not support
        rejected |= dict.fromkeys(choices, f"a small model of the family cannot be run: {error!r}")
        return None
    for name in choices:
        try:
            model.set_attn_implementation(name)
            found = _packed(model, rows) if name == PACKED else _separate(model, rows)
        except Exception as error:  # noqa: BLE001 - as above
            rejected[name] = f"it fails: {error!r}"
            continue
        if torch.allclose(found, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max())):
            return name
        rejected[name] = "its logits differ from those of eager attention"
    return None


def _random_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Scaled so that attention contributes as much as other layers: the default would hide an error in it.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def _separate(model: Any, rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def _packed(model: Any, rows: Sequence[Tensor]) -> Tensor:
    ids = torch.cat([*rows])
    packed = Packed(ids.numpy(), np.cumsum([0, *map(len, rows)], dtype=np.int32), np.zeros(0, np.int64))
    logits: Tensor = model(**model_inputs(packed, ids, packs=True)).logits[0]
    return logits


# --- A LoRA adapter (arXiv 2106.09685) on a causal language model, built with PEFT ------------------------------------


_NAME = "default"
"""PEFT's name of an unnamed adapter."""
_HEAD = "base_model.model.score."
"""The head of a reward model, which is trained whole: PEFT's copy of it, in its file under this prefix."""
_HEAD_COPY = f"{_HEAD}modules_to_save.{_NAME}.weight"


def _towers_of(model: Any) -> str | None:
    """Return a regular expression of the modules that a model has besides its language model; None without any."""
    if model.config.get_text_config() is model.config:
        return None
    language = model.get_decoder()
    towers = [name for name, part in model.base_model.named_children() if part is not language]
    return rf"(.*\.)?({'|'.join(towers)})(\..*)?"


class Adapter:
    """The adapter of one model. Creating it freezes the model's own parameters.

    Its tensors are float32 for any model dtype, and uninitialized: see `initial_values`.
    """

    def __init__(self, model: Any, spec: LoraSpec, names: FileNames, *, scores: bool = False) -> None:
        """Add an adapter to `model`, in place.

        Args:
            model: a transformers model, on any device, also torch's meta device.
            spec: the adapter's settings.
            names: the names of the model's tensors in files.
            scores: True if it is a reward model, whose head is trained too.

        Raises:
            ConfigError: PEFT is not installed, or `lora.targets` names modules that cannot have an adapter.

        """
        try:
            import peft  # noqa: PLC0415 - only jobs that train an adapter need it
        except ImportError as error:
            raise ConfigError(f"elastic.weights: lora needs PEFT: {pip_install('trainer')}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            exclude_modules=_towers_of(model),
            task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        )
        check_targets(spec, shapes)
        try:
            self._wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.targets: {error}") from error
        self._model = model
        # PEFT names the folder that the model was loaded from, which may exist on this machine only.
        config.base_model_name_or_path = spec.base_model_name_or_path or None
        self.json = config_json_of(config)
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
            if name in names:
                raise ConfigError(
                    f"elastic.weights: lora does not support model type {model.config.model_type}, whose files have "
                    f"{name} under another name ({names[name][0]}): set elastic.weights: full"
                )
        model.eval()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors, by PEFT's names."""
        named = dict(self._wrapped.named_parameters())
        head = {f"{_HEAD}weight": named[_HEAD_COPY]} if _HEAD_COPY in named else {}
        return {own: named[name] for name, own in wrapped_names(named, _NAME).adapter.items()} | head

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The model's own parameters, by their Hugging Face names, without a head that is trained."""
        named = {name: one for name, one in self._model.named_parameters() if not name.startswith("score.")}
        return {own: named[name] for name, own in wrapped_names(named, _NAME).model.items()}

    def initial_values(self, seed: int, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values that training starts from, on the CPU: those of PEFT, which are the identity.

        They depend on the seed and the shapes only, not on the device or on how the tensors are sharded.

        Args:
            seed: the job's.
            others: values of trained tensors of the model, by their Hugging Face names.

        """
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros(tensor.shape) for name, tensor in self.tensors.items()}
        for name, value in values.items():
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        return values | {f"base_model.model.{name}": value for name, value in others.items()}

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
