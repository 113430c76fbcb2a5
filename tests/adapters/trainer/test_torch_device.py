"""Devices in settings: available ones are accepted."""

from __future__ import annotations

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.process.torch_device import require_device


def test_a_device_that_is_here_is_taken() -> None:
    require_device("cpu", "RLBOOST_TRAINER_DEVICE")


@pytest.mark.parametrize("device", ["cuda:99", "nothing", "cpu:x", ""])
def test_unavailable_device_error_names_the_setting_and_alternatives(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"RLBOOST_TRAINER_DEVICE: device '{device}' cannot be used .available: cpu"):
        require_device(device, "RLBOOST_TRAINER_DEVICE")
