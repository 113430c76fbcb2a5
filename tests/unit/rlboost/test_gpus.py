"""Which GPUs a machine has, and which of them an option names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.local.layout import Gpu, list_gpus, parse_list, select, visible
from rlboost.shared.errors import ConfigError
from tests.support import fake_gpus


def indexes(gpus: list[Gpu]) -> list[int]:
    return [gpu.index for gpu in gpus]


@pytest.mark.parametrize(
    ("given", "found"), [("all", [0, 1, 2, 3]), ("2", [2]), ("0-2", [0, 1, 2]), ("3,0-1", [3, 0, 1])]
)
def test_select_list_of_gpus_returns_them_in_order(given: str, found: list[int]) -> None:
    assert indexes(select(given, fake_gpus.gpus(4), "--gpus")) == found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("0,1,0", "--gpus '0,1,0' names GPU 0 twice"),
        ("0-2,1", "names GPU 1 twice"),
        ("0-7", "there is no GPU 4 to use; there are: 0, 1, 2, 3"),
        ("3-1", "the range 3-1 is empty"),
        ("cuda:0", "is not a list of GPUs: use the form 0-3,6, or all"),
        ("0,", "is not a list of GPUs"),
    ],
)
def test_select_invalid_list_names_the_mistake(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        select(given, fake_gpus.gpus(4), "--gpus")


def test_parse_list_reads_the_output_of_nvidia_smi() -> None:
    text = "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 00000000:FE:00.0, 570.86.15\n1, GPU-bb, GB10, [N/A], 0:1, 580\n"
    assert parse_list(text) == [
        Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", 81559 << 20, "570.86.15"),
        Gpu(1, "GPU-bb", "GB10", 0, "580"),
    ]
    with pytest.raises(ConfigError, match="unknown form, 'No devices were found'"):
        parse_list("No devices were found\n")


@pytest.mark.parametrize(
    ("variable", "found"), [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-1", [1]), ("0,9,1", [0])]
)
def test_visible_follows_cuda_visible_devices(variable: str | None, found: list[int]) -> None:
    assert indexes(visible(fake_gpus.gpus(3), variable)) == found


def test_list_gpus_asks_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_gpus.install(tmp_path / 'bin', 2)}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_gpus() == fake_gpus.gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert indexes(list_gpus()) == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no GPU that this process may use"):
        list_gpus()


def test_list_gpus_without_driver_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-smi is not on PATH"):
        list_gpus()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="exit code 9: NVIDIA-SMI has failed"):
        list_gpus()
