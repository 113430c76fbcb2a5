"""Whether torch can use a device here. Imports torch: import it late."""

from __future__ import annotations

import structlog
import torch

from shared.errors import ConfigError

log = structlog.get_logger(__name__)


def require_device(device: str, setting: str) -> None:
    """Refuse a device on which no tensor can be made; say so where a GPU would be left idle.

    Args:
        device: as torch names it.
        setting: where it was said.

    Raises:
        ConfigError: with the devices that are here.

    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        (why, *_) = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(f"{setting}: device {device!r} cannot be used, here are {', '.join(here)}: {why}") from error
    if torch.device(device).type == "cpu" and torch.cuda.is_available():
        log.warning("gpu_unused", advice=f"there is a GPU here: to use it, set {setting}=cuda")
