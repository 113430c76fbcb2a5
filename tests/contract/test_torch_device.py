"""Devices in settings: available ones are accepted."""

from __future__ import annotations

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.torch_device import require_device


def test_a_device_that_is_here_is_taken() -> None:
    require_device("cpu", "RLBOOST_TRAINER_DEVICE")


@pytest.mark.parametrize("device", ["cuda:99", "nothing", "cpu:x", ""])
def test_another_is_refused_with_its_setting_and_what_there_is(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"RLBOOST_TRAINER_DEVICE: device '{device}' cannot be used .available: cpu"):
        require_device(device, "RLBOOST_TRAINER_DEVICE")
