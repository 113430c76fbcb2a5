"""What a job's model is trained on, for `perf/mfu`."""

from __future__ import annotations

from pathlib import Path

import torch

from services.trainer.domain.utilization import Machine, flops_per_token, peak_flops
from shared.errors import ConfigError
from shared.jobspec import JobSpec
from shared.model_folder import config_of, n_parameters

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json`; with experts a token does not meet every parameter."""


def machine_of(spec: JobSpec, model: Path, device: str) -> Machine:
    """Return what is known of the devices and of the model in the directory `model`; `device` is torch's name."""
    trainer = spec.trainer
    n_devices = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel
    peak = None
    if torch.device(device).type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), trainer.dtype)
    if peak is None:
        return Machine(n_devices)
    try:
        dense = not any(config_of(model).get(key) for key in _EXPERTS)
        flops = flops_per_token(n_parameters(model), frozen=spec.adapter is not None) if dense else 0.0
    except ConfigError:
        flops = 0.0
    return Machine(n_devices, flops, peak)
