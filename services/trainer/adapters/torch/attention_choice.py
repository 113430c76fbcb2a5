"""Chooses the attention implementation that trains a model.

It is that of packed rows if they give the same logits as transformers' eager attention, otherwise an implementation of
transformers. The configuration does not show this: some families pass more to attention (sinks, learned masks) or omit
row boundaries. So a small random model of the family runs with each candidate.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlboost.services.trainer.adapters.torch.batch import Packed
from rlboost.services.trainer.adapters.torch.packing import PACKED, model_inputs
from rlboost.shared.errors import ConfigError

log = structlog.get_logger(__name__)

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

    It is `packing.PACKED` if layers mix tokens by causal attention only, and packed rows have the logits of separate
    ones. Recurrent layers, convolutions along the tokens and attention in chunks would mix neighboring rows. A model
    with them computes one row at a time, by transformers' own attention.

    Args:
        config: configuration of a causal language model of transformers.
        warns: log a warning if rows cannot be packed.

    """
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
