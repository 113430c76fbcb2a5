"""Describes the devices and the model's cost per token, for `perf/mfu`."""

from __future__ import annotations

from pathlib import Path

import torch

from rlboost.services.trainer.domain.utilization import TrainingHardware, flops_per_token, peak_flops
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.model.folder import count_parameters, read_config


def hardware_of(spec: JobSpec, model: Path, device: str) -> TrainingHardware:
    """Return the devices, peak FLOP/s and FLOP per token, as far as known; `device` is torch's name."""
    trainer = spec.trainer
    n_devices = trainer.n_ranks
    peak = None
    if torch.device(device).type == "cuda" and torch.cuda.is_available():  # else the GPUs are on other machines
        peak = peak_flops(torch.cuda.get_device_name(device), trainer.dtype)
    if peak is None:
        return TrainingHardware(n_devices)
    try:
        dense = not is_mixture(read_config(model))
        flops = flops_per_token(count_parameters(model), frozen=spec.adapter is not None) if dense else 0.0
    except ConfigError:
        flops = 0.0
    return TrainingHardware(n_devices, flops, peak)
