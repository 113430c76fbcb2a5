"""vLLM's arguments for the options of an engine."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm import AsyncEngineArgs, envs
from vllm import __version__ as vllm_version
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.platforms import current_platform

from rlboost.services.rollout_worker.adapters.vllm import plugin
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions, argument_error
from rlboost.services.rollout_worker.ports import StagedAdapter
from rlboost.shared.data.vision import FAMILIES, has_towers
from rlboost.shared.errors import ConfigError, Fatal, UnsuitableWeights
from rlboost.shared.files import replace_file
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.weights.lora import factors_of

# --- The folder that vLLM reads a model's `config.json` from ----------------------------------------------------------


TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""With which transformers takes all of a tokenizer from `tokenizer.json`, whatever the model."""


def model_folder(config: dict[str, Any], tokenizer_json: str = "") -> Path:
    """Return a folder with this `config.json` in vLLM's cache: equal configs get the same folder.

    vLLM's compilation cache depends on the model's path: with a new path per start, every worker would compile again.

    Args:
        config: the model's `config.json`.
        tokenizer_json: a `tokenizer_for_grammars`; empty for none.

    Raises:
        UnsuitableWeights: the configuration names no model.
        ConfigError: the cache cannot be written.

    """
    named = {**config, "architectures": _architectures(config)}
    files = {"config.json": json.dumps(named, sort_keys=True)}
    if tokenizer_json:
        files |= {
            TOKENIZER_FILE: tokenizer_json,
            "tokenizer_config.json": json.dumps(_TOKENIZER_CONFIG),
        }
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()
    folder = Path(envs.VLLM_CACHE_ROOT) / "rlboost_models" / digest[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            file = folder / name
            if not file.exists() or file.read_bytes() != text.encode():  # a machine that lost power may have damaged it
                # Several workers may start at the same time.
                replace_file(file, text)
    except OSError as error:
        raise ConfigError(f"vllm's cache cannot be written ({error}): set VLLM_CACHE_ROOT to one that can") from error
    return folder


def _architectures(config: dict[str, Any]) -> list[str]:
    """Return the model's class, which vLLM needs and not every configuration names."""
    if (family := config.get("model_type", "")) in FAMILIES:
        if family not in plugin.VISION_MODELS:
            raise UnsuitableWeights(
                f"config.json: of models that see images, vllm workers support {', '.join(plugin.VISION_MODELS)} and "
                f"not {family}: use torch workers"
            )
        return [plugin.VISION_MODELS[family]]
    if config.get("architectures"):
        return list(config["architectures"])
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if has_towers(config) else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names.get(family)
    if name is None:
        raise UnsuitableWeights(
            f"config.json: transformers has no causal language model of model_type {config.get('model_type')!r}: "
            f"name the model's class in architectures"
        )
    return [name]


# --- The folder that vLLM reads an adapter from -----------------------------------------------------------------------


_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that adapters may change: for each, vLLM reserves memory at its start."""
_ADAPTER_FILE = "adapter_model.safetensors"


def adapter_refusal(adapter: StagedAdapter, max_rank: int) -> str:
    """Return why vLLM cannot hold an adapter next to its weights; empty if it can."""
    if adapter.rank > max_rank:
        return f"its rank {adapter.rank} is above RLBOOST_WORKER_MAX_ADAPTER_RANK, {max_rank}"
    others = sorted(name for name in adapter.targets if name.removesuffix(".weight").rpartition(".")[2] not in _ADAPTED)
    return f"{others[0]} is not a layer that vllm workers adapt: {', '.join(_ADAPTED)}" if others else ""


def write_adapter(adapter: StagedAdapter, folder: Path) -> None:
    """Write an adapter as PEFT does.

    Raises:
        Corrupt: see `StagedAdapter.factors`.
        Fatal: the folder cannot be written.

    """
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.scaling * adapter.rank,
        "target_modules": sorted(adapter.targets),
    }
    tensors: dict[str, Any] = {}
    for name, *pair in adapter.factors():
        tensors.update(zip(factors_of(name), pair, strict=True))
    try:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / _ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise Fatal(f"{folder}: an adapter cannot be written ({error}): free space, or set TMPDIR") from error


def written_wrongly(adapter: StagedAdapter, folder: Path) -> list[str]:
    """Return the names of an adapter's tensors that the folder has with other bits."""
    tensors = load_file(folder / _ADAPTER_FILE)
    pairs = ((name, factors_of(name)) for name in adapter.targets)
    return adapter.factors_differing((name, tensors[pair.a], tensors[pair.b]) for name, pair in pairs)


# --- Arguments --------------------------------------------------------------------------------------------------------


_CPU_KV_CACHE_BYTES = 256 << 20
"""Default on a CPU: vLLM's own default is a large part of the machine's memory."""


def check_device(device: str) -> None:
    """Check that the installed vLLM supports a device.

    Raises:
        ConfigError: it does not.

    """
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(f"device {device!r}: vllm uses the first device; set CUDA_VISIBLE_DEVICES={index} instead")
    if kind != current_platform.device_type:
        raise ConfigError(
            f"device {device!r}: the installed vllm runs on {current_platform.device_type or 'no device'}"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check additional engine arguments; vLLM checks most of their values when it starts.

    Those that pass may still change how tokens are sampled: the sampling check decides before anything is served.

    Raises:
        ConfigError: vLLM has no such argument, RLBoost sets it, or no sample could be trained on with it.

    """
    if arguments.get("quantization_config") and not arguments.get("quantization"):
        raise ConfigError(
            "RLBOOST_WORKER_VLLM_ARGS: vllm ignores quantization_config without quantization: add "
            '"quantization": "online", or remove it'
        )
    known = {field.name for field in fields(AsyncEngineArgs)}
    own = {**_own_arguments(Path(), VllmOptions(1)), **_adapter_arguments(VllmOptions(1))}
    owned = own.keys() - {"logprobs_mode"}
    for name, value in arguments.items():
        if error := argument_error(name, value):
            raise ConfigError(f"RLBOOST_WORKER_VLLM_ARGS: {error}")
        if name in owned:
            raise ConfigError(
                f"RLBOOST_WORKER_VLLM_ARGS: {name} is not free: another setting or RLBoost itself sets it"
            )
        if name not in known:
            similar = difflib.get_close_matches(name, known - owned, 1)
            raise ConfigError(
                f"RLBOOST_WORKER_VLLM_ARGS: vllm {vllm_version} has no engine argument {name!r}: "
                + (f"did you mean {similar[0]}?" if similar else "remove it")
            )


def engine_args(directory: Path, options: VllmOptions) -> AsyncEngineArgs:
    """Return the arguments of an engine whose model is in a directory.

    Raises:
        ConfigError: vLLM supports no adapters of the maximum rank.

    """
    config = json.loads((directory / "config.json").read_text())
    return AsyncEngineArgs(
        **{
            **_own_arguments(directory, options),
            **(_SERVING_ARGUMENTS | {"max_num_seqs": 2 * options.slots} if options.served_model else {}),
            **({"language_model_only": True} if has_towers(config) and config["model_type"] not in FAMILIES else {}),
            **(_corrections(config) if options.device == "cpu" else {}),
            **(_adapter_arguments(options) if options.max_adapters and _holds_adapters(config) else {}),
            **options.vllm_args,
        }
    )


_SERVING_ARGUMENTS = {
    "load_format": "auto",
    "skip_tokenizer_init": False,
    "generation_config": "auto",  # for the requests of others; samples say all of it themselves
    "scheduling_policy": "priority",
}
"""Of an engine that serves a model: as `vllm serve` has them."""


def _corrections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without which vLLM 0.32 computes wrongly on a CPU; the user's take precedence."""
    # The CPU kernel rotates wrong parts of the queries of latent attention, which have three dimensions.
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if "kv_lora_rank" in config else {}


def _holds_adapters(config: Mapping[str, Any]) -> bool:
    """Return True if vLLM can hold adapters of this model, and a test has shown that it computes them."""
    # With adapters, vLLM 0.32 computes experts by kernels that CPUs do not have.
    is_tested = not is_mixture(config) and not has_towers(config)
    known = ModelRegistry.models.get(config["architectures"][0]) if is_tested else None
    return known is not None and supports_lora(known.load_model_cls())


def _adapter_arguments(options: VllmOptions) -> dict[str, Any]:
    ranks = get_args(MaxLoRARanks)
    rank = next((one for one in ranks if one >= options.max_adapter_rank), None)
    if rank is None:
        raise ConfigError(
            f"RLBOOST_WORKER_MAX_ADAPTER_RANK is {options.max_adapter_rank}, and vllm holds adapters up to rank "
            f"{max(ranks)}: lower it"
        )
    # The one that makes room for a new one is removed after the load. And for requests without an adapter, the CPU
    # kernels of vLLM 0.32 compute the last place of all, so that must stay empty.
    slots = options.max_adapters + (2 if options.device == "cpu" else 1)
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": rank,
        "lora_target_modules": [*_ADAPTED],
    }


def _own_arguments(directory: Path, options: VllmOptions) -> dict[str, Any]:
    on_cpu = options.device == "cpu"
    return {
        "model": str(directory),
        "load_format": "dummy",  # weights come through `load`
        "dtype": options.dtype,
        "skip_tokenizer_init": not (directory / TOKENIZER_FILE).exists(),  # only grammars need it
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),  # without another one to fall back to
        "generation_config": "vllm",
        "max_num_seqs": options.slots,
        "gpu_memory_utilization": options.gpu_memory_utilization or AsyncEngineArgs.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None),
        "enforce_eager": on_cpu,  # compilation costs more time than it saves
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp",
        "enable_sleep_mode": options.enable_sleep and not on_cpu,
        "logprobs_mode": options.logprobs_mode,
        # Images come as `vision` has prepared them.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "weight_transfer_config": WeightTransferConfig(backend=plugin.NAME),
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
