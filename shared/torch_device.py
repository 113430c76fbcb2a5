"""Whether torch can use a device here. Imports torch: import it late."""

from __future__ import annotations

import torch

from shared.errors import ConfigError


def require_device(device: str, setting: str) -> None:
    """Refuse a device on which no tensor can be made.

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
