"""What `perf/mfu` is made of, from a model's own files; the device's name is made up, as no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.model_checks import hardware_of
from rlboost.services.trainer.domain.metrics import TrainingHardware
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import count_parameters, read_tensor_shapes
from tests.support.model_folder import write_model
from tests.support.trainer_rig import spec

BF16 = {"dtype": "bfloat16"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    return write_model(tmp_path / "model")


def test_machine_flops_follow_from_parameters_and_adapter(model: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    n = sum(tensor.numel() for tensor in loaded.parameters())
    assert count_parameters(model) == n
    assert hardware_of(spec(trainer=BF16), model, "cuda:0") == TrainingHardware(1, 6.0 * n, 989e12)
    adapter = spec(trainer=BF16, elastic={"weights": "lora"})
    assert hardware_of(adapter, model, "cuda") == TrainingHardware(1, 4.0 * n, 989e12)
    ranks = {"backend": "megatron", "tensor_parallel": 2, "data_parallel": 4}
    assert hardware_of(spec(trainer=BF16 | ranks), model, "cuda").n_devices == 8


def test_machine_is_unknown_for_other_devices_dtypes_and_experts(model: Path) -> None:
    assert hardware_of(spec(trainer=BF16), model, "cpu") == TrainingHardware()
    assert hardware_of(spec(), model, "cuda") == TrainingHardware()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    assert hardware_of(spec(trainer=BF16), model, "cuda").flops_per_token == 0.0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its header has 0 bytes, the file 0"),
        (b"\xff" * 16, "its header has 18446744073709551615 bytes, the file 16"),
        (b"\x02" + b"\0" * 7 + b"[]", "its header is not a JSON object"),
        (b"\x2b" + b"\0" * 7 + b'{"a": {"data_offsets": [0, 0],"shape":"b"}}', r"the shape of a is \('b',\)"),
    ],
)
def test_an_invalid_safetensors_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.safetensors is not a whole \.safetensors file: {reason}"):
        read_tensor_shapes(tmp_path)
