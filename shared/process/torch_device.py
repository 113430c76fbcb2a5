"""Checks that torch can use a device. Imports torch, so import this module late."""

from __future__ import annotations

import structlog
import torch

from rlboost.shared.errors import ConfigError

log = structlog.get_logger(__name__)


def require_device(device: str, setting: str) -> None:
    """Check that a tensor can be created on a device; log a warning if a GPU would stay idle.

    Args:
        device: torch's name of the device.
        setting: the setting that names it.

    Raises:
        ConfigError: the device is unusable; the text lists the available ones.

    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        (why, *_) = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{setting}: device {device!r} cannot be used (available: {', '.join(available)}): {why}"
        ) from error
    if torch.device(device).type == "cpu" and torch.cuda.is_available():
        log.warning("gpu_unused", advice=f"a GPU is available: to use it, set {setting}=cuda")
