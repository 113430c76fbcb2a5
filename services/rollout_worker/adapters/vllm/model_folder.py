"""The folder that vLLM reads a model's `config.json` from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import envs

from rlboost.shared.atomic_file import replace_file
from rlboost.shared.errors import ConfigError


def model_folder(config: dict[str, Any]) -> Path:
    """Return a folder with this `config.json` in vLLM's cache: equal configs get the same folder.

    vLLM's compilation cache depends on the model's path: with a new path per start, every worker would compile again.

    Args:
        config: the model's `config.json`.

    Raises:
        ConfigError: the configuration names no model, or the cache cannot be written.

    """
    named = {**config, "architectures": _architectures(config)}
    text = json.dumps(named, sort_keys=True)
    folder = Path(envs.VLLM_CACHE_ROOT) / "rlboost_models" / hashlib.sha256(text.encode()).hexdigest()[:16]
    file = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_bytes() != text.encode():  # a machine that lost power may have damaged it
            # Several workers may start at the same time.
            replace_file(file, text)
    except OSError as error:
        raise ConfigError(f"vllm's cache cannot be written ({error}): set VLLM_CACHE_ROOT to one that can") from error
    return folder


def _architectures(config: dict[str, Any]) -> list[str]:
    """Return the model's class, which vLLM needs and not every configuration names."""
    if config.get("architectures"):
        return list(config["architectures"])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))
    if name is None:
        raise ConfigError(
            f"config.json: transformers has no causal language model of model_type {config.get('model_type')!r}: "
            f"name the model's class in architectures"
        )
    return [name]
