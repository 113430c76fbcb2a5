"""Check a job whose model is a local folder against the GPUs of the system that will run it, before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rlboost.jobs import memory
from rlboost.jobs.memory import size_of
from rlboost.local.layout import DeviceSummary, n_gpus
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.model.experts import count_in_experts
from rlboost.shared.model.folder import count_parameters, read_config

_GIB = 1 << 30


class Fit(NamedTuple):
    """How a job fits on the GPUs, one line each."""

    problems: list[str]
    advice: list[str]


def fit(spec: JobSpec, devices: DeviceSummary) -> Fit:
    """Return what does not fit for certain, and what probably wastes a GPU or runs out of memory.

    Sizes that the model's files do not give are not checked.
    """
    found = Fit([], [])
    try:
        config = read_config(Path(spec.model).expanduser())
        n_parameters = count_parameters(Path(spec.model).expanduser())
        n_in_experts = count_in_experts(Path(spec.model).expanduser())
    except ConfigError:
        return found
    config = config.get("text_config", config)
    if devices.tensor_parallel:
        _check_engines(spec, config, n_parameters, devices, found)
    if spec.kind != "eval" and spec.trainer.nodes == 1:  # the GPUs of other machines are not known here
        model = memory.trained_model(spec, n_parameters, n_in_experts, *_added_parameters(spec, config))
        _check_trainer(spec, model, devices, found)
    return found


def _added_parameters(spec: JobSpec, config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the parameters of adapter and critic, teacher, and reward models; 0 in a family of unknown sizes."""
    try:
        added = memory.added_parameters(spec, size_of(config))
        return added, memory.teacher_parameters(spec), memory.scoring_parameters(spec)
    except ConfigError:
        return 0, 0, 0


def _check_engines(
    spec: JobSpec, config: dict[str, Any], n_parameters: int, devices: DeviceSummary, found: Fit
) -> None:
    if isinstance(spec, OfflineJob):
        return
    split = devices.tensor_parallel
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % split:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        found.problems.append(
            f"model: its {heads} attention heads cannot be divided by --tensor-parallel {split}: use one of {divisors}"
        )
    budget = devices.engine_memory_bytes
    if not budget:
        return
    n_tokens = spec.sampling.max_tokens
    needed = memory.engine_bytes(n_parameters, _kv_token_bytes(config), n_tokens, split)
    if needed > budget:
        found.problems.append(
            f"model: an engine needs {_gib(needed)} per GPU for weights and one sample of {n_tokens} tokens, and has "
            f"{_gib(budget)}: raise --gpu-memory-utilization or --tensor-parallel, or take a smaller model"
        )


def _check_trainer(spec: JobSpec, model: memory.TrainedModel, devices: DeviceSummary, found: Fit) -> None:
    trainer = spec.trainer
    n_ranks = trainer.n_ranks
    if n_ranks > devices.trainer_gpus:
        found.problems.append(
            f"{_ranks(trainer)}: the job trains in {n_ranks} processes with a GPU each, and the trainer has "
            f"{n_gpus(devices.trainer_gpus)}: lower one, or give more --trainer-gpus"
        )
    elif n_ranks < devices.trainer_gpus:
        found.advice.append(
            f"{_ranks(trainer)}: the job trains on {n_ranks} of the trainer's {n_gpus(devices.trainer_gpus)}: "
            "raise one to use them all"
        )
    available = devices.trainer_memory_bytes
    if not available:
        return
    needed = memory.state_bytes(model, trainer)
    if needed > available:
        found.problems.append(
            f"model: the trainer needs {_gib(needed)} per GPU for weights, optimizer and gradients, and a GPU has "
            f"{_gib(available)}: {_more_shards(trainer)}, or see docs/gpu-memory.md"
        )
        return
    resident = memory.generating_bytes(model, trainer)
    if (n_others := devices.n_time_sharing - 1) and needed + n_others * resident > available:
        offload = "set it to all" if trainer.offload != "all" else "lower --trainers"
        found.problems.append(
            f"trainer.offload: {devices.n_time_sharing} trainers use a GPU of {_gib(available)} in turns. One of a job "
            f"like this needs {_gib(needed)} while it trains, and each of the others keeps {_gib(resident)}: {offload}"
        )
    if devices.shared_memory_bytes and resident + devices.shared_memory_bytes > available:
        found.advice.append(
            f"trainer.offload: the trainer keeps {_gib(resident)} on a GPU of {_gib(available)} while its engines use "
            f"{_gib(devices.shared_memory_bytes)}: set it to all, or lower --gpu-memory-utilization"
        )


def _ranks(trainer: TrainerSpec) -> str:
    """Return the keys whose product is the number of ranks."""
    split = "tensor_parallel x pipeline_parallel x " if trainer.backend == "megatron" else ""
    return f"trainer.data_parallel x {split}context_parallel"


def _more_shards(trainer: TrainerSpec) -> str:
    return "raise trainer.fsdp_size, or remove it" if trainer.fsdp_size else f"raise {_ranks(trainer)}"


def _kv_token_bytes(config: dict[str, Any]) -> int:
    """Return the KV cache of one token, 0 if the configuration does not give it."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    layers = config.get("num_hidden_layers")
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)) or not heads:
        return 0
    head_dim = config.get("head_dim") or hidden // heads
    return memory.kv_token_bytes(layers, config.get("num_key_value_heads") or heads, head_dim)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB"
