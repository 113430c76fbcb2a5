"""What `perf/mfu` is made of, from a model's own files; the device's name is made up, as no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.adapters.machine import machine_of
from services.trainer.domain.utilization import Machine
from shared.errors import ConfigError
from shared.model_folder import n_parameters, tensors_of
from tests.support.model_folder import write_model
from tests.support.trainer_rig import spec

BF16 = {"dtype": "bfloat16"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    return write_model(tmp_path / "model")


def test_operations_follow_from_the_parameters_and_from_what_is_trained(model: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    n = sum(tensor.numel() for tensor in loaded.parameters())
    assert n_parameters(model) == n
    assert machine_of(spec(trainer=BF16), model, "cuda:0") == Machine(1, 6.0 * n, 989e12)
    adapter = spec(trainer=BF16, elastic={"weights": "lora"})
    assert machine_of(adapter, model, "cuda") == Machine(1, 4.0 * n, 989e12)
    ranks = {"backend": "megatron", "tensor_parallel": 2, "data_parallel": 4}
    assert machine_of(spec(trainer=BF16 | ranks), model, "cuda").n_devices == 8


def test_nothing_is_said_of_other_devices_other_dtypes_and_models_with_experts(model: Path) -> None:
    assert machine_of(spec(trainer=BF16), model, "cpu") == Machine()
    assert machine_of(spec(), model, "cuda") == Machine()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    assert machine_of(spec(trainer=BF16), model, "cuda").flops_per_token == 0.0


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no \.safetensors file"):
        tensors_of(tmp_path)
