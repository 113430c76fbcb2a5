"""Whether a job fits on a system's GPUs, computed from the headers of a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.commands import job_files
from rlboost.jobs import memory
from rlboost.jobs.check import Fit, fit
from rlboost.jobs.memory import TrainedModel
from rlboost.local.layout import DeviceSummary
from rlboost.local.spec_file import SystemSpec, placed
from rlboost.local.state import Config, StateDir
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import TrainerSpec
from tests.support.fake_gpus import gpus

GIB = 1 << 30
BILLION = 10**9
QWEN3_8B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
}


def write_model(folder: Path, billions: float, in_tower: float = 0.0, **config: Any) -> None:
    """Write a model of which only the headers exist: nothing may read more."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_8B, **config}))
    sizes = {"w": billions - in_tower, "model.visual.w": in_tower}
    tensors = {
        name: {"dtype": "BF16", "shape": [1000, round(size * 1e6)], "data_offsets": [0, 0]}
        for name, size in sizes.items()
    }
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def checked(tmp_path: Path, billions: float, system: dict[str, Any], n: int = 8, **job: Any) -> Fit:
    write_model(tmp_path / "model", billions, **job.pop("config", {}))
    spec = parse(
        {
            "model": str(tmp_path / "model"),
            "data": {"train": "train.jsonl"},
            "reward": {"function": "m:f"},
            "steps": 1,
            **job,
        }
    )
    devices = placed(SystemSpec(gpus="all", **system), tmp_path, gpus(n)).layout.summary()
    assert devices is not None
    return fit(spec, devices)


ALL = {"data_parallel": 8, "dtype": "bfloat16", "offload": "all"}


def test_job_that_fits_has_no_problem(tmp_path: Path) -> None:
    assert checked(tmp_path, 8.2, {"tensor_parallel": 2}, trainer=ALL) == Fit([], [])


def test_heads_that_tensor_parallel_does_not_divide_are_a_problem(tmp_path: Path) -> None:
    config = {"num_attention_heads": 14, "num_key_value_heads": 2}
    found = checked(tmp_path, 0.5, {"tensor_parallel": 4}, trainer=ALL, config=config)
    assert found.problems == [
        "model: its 14 attention heads cannot be divided by --tensor-parallel 4: use one of 1, 2, 7, 14"
    ]


def test_model_too_large_for_the_trainer_is_a_problem(tmp_path: Path) -> None:
    one = {"dtype": "bfloat16", "offload": "all"}
    (problem,) = checked(tmp_path, 8.2, {}, n=1, trainer=one).problems
    assert problem.startswith("model: the trainer needs 122.2 GiB per GPU for weights, optimizer and gradients")
    assert "a GPU has 79.6 GiB" in problem


def test_frozen_tower_needs_no_moments_and_no_gradients(tmp_path: Path) -> None:
    one, config = {"dtype": "bfloat16", "offload": "all"}, {"model_type": "qwen3_vl", "in_tower": 0.7}
    (problem,) = checked(tmp_path, 5.5, {}, n=1, trainer=one, config=config).problems
    assert problem.startswith("model: the trainer needs 82.0 GiB per GPU for weights, optimizer and gradients")
    frozen = {**one, "freeze_vision_tower": True}
    assert checked(tmp_path, 5.5, {}, n=1, trainer=frozen, config=config) == Fit([], [])
    other = {"model_type": "gemma3", "in_tower": 0.7}  # never trained
    assert checked(tmp_path, 5.5, {}, n=1, trainer=one, config=other) == Fit([], [])


def test_model_too_large_for_an_engine_is_a_problem(tmp_path: Path) -> None:
    found = checked(tmp_path, 32.8, {}, trainer=ALL).problems
    assert found[0].startswith("model: an engine needs 61.")
    assert "and has 31.9 GiB: raise --gpu-memory-utilization or --tensor-parallel" in found[0]
    assert checked(tmp_path, 32.8, {"tensor_parallel": 4}, trainer=ALL).problems == []


def test_kv_cache_of_one_sample_counts(tmp_path: Path) -> None:
    sampling = {"max_tokens": 130_000}
    (problem,) = checked(tmp_path, 8.2, {}, trainer=ALL, sampling=sampling).problems
    assert "weights and one sample of 130000 tokens" in problem


def test_processes_of_the_trainer_are_compared_with_its_gpus(tmp_path: Path) -> None:
    (problem,) = checked(tmp_path, 1, {}, n=4, trainer={"data_parallel": 8, "offload": "all"}).problems
    assert "trains in 8 processes with a GPU each, and the trainer has 4 GPUs" in problem
    (advice,) = checked(tmp_path, 1, {}, n=4, trainer={"data_parallel": 2, "offload": "all"}).advice
    both = "trainer.data_parallel x context_parallel"
    assert advice.startswith(f"{both}: the job trains on 2 of the trainer's 4 GPUs")
    (problem,) = checked(tmp_path, 1, {}, n=4, trainer={"context_parallel": 8, "offload": "all"}).problems
    assert problem.startswith(f"{both}: the job trains in 8 processes")


def test_processes_on_other_machines_are_not_compared_with_its_gpus(tmp_path: Path) -> None:
    assert checked(tmp_path, 8, {}, trainer={**ALL, "data_parallel": 16, "nodes": 2}).problems == []


def test_state_that_stays_next_to_an_engine_is_advised_against(tmp_path: Path) -> None:
    (advice,) = checked(tmp_path, 4.4, {}, n=1, trainer={"dtype": "bfloat16"}).advice
    assert advice.startswith(
        "trainer.offload: the trainer keeps 49.2 GiB on a GPU of 79.6 GiB while its engines use 31.9"
    )
    assert checked(tmp_path, 4.4, {}, n=1, trainer={"offload": "optimizer"}).advice == []


def test_lora_needs_memory_for_the_frozen_weights_alone(tmp_path: Path) -> None:
    job: dict[str, Any] = {"elastic": {"weights": "lora"}, "trainer": {"dtype": "bfloat16", "offload": "all"}}
    assert checked(tmp_path, 14, {}, n=1, **job).problems == []


def test_remote_model_is_not_checked(tmp_path: Path) -> None:
    devices = DeviceSummary(1, GIB, 1, GIB, GIB)
    spec = parse({"model": "Qwen/Qwen3-8B", "data": {"train": "t.jsonl"}, "reward": {"function": "m:f"}, "steps": 1})
    assert fit(spec, devices) == Fit([], [])


@pytest.mark.parametrize(
    ("model", "spec", "per_parameter"),
    [
        (TrainedModel(BILLION), TrainerSpec(), 16),
        (TrainedModel(BILLION, muon=True), TrainerSpec(), 12),
        (TrainedModel(BILLION, has_reference=True), TrainerSpec(), 20),
        (TrainedModel(BILLION, frozen=True), TrainerSpec(dtype="bfloat16"), 2),
        (TrainedModel(BILLION, n_added=BILLION), TrainerSpec(data_parallel=8), 4),
        (TrainedModel(BILLION, frozen=True, n_added=BILLION // 100), TrainerSpec(dtype="bfloat16"), 2.16),
        (TrainedModel(BILLION), TrainerSpec(data_parallel=8), 2),
        (TrainedModel(BILLION), TrainerSpec(backend="megatron", dtype="bfloat16"), 18),
        (TrainedModel(BILLION), TrainerSpec(backend="megatron", tensor_parallel=2, pipeline_parallel=4), 2),
        (
            TrainedModel(BILLION),
            TrainerSpec(backend="megatron", dtype="bfloat16", data_parallel=4, distributed_optimizer=True),
            9,
        ),
        (
            TrainedModel(BILLION, n_in_experts=BILLION // 2),
            TrainerSpec(backend="megatron", dtype="bfloat16", data_parallel=4, expert_parallel=2),
            18 * 0.75,
        ),
        (
            TrainedModel(BILLION, n_in_experts=BILLION // 2),
            TrainerSpec(
                backend="megatron", dtype="bfloat16", data_parallel=4, expert_parallel=4, distributed_optimizer=True
            ),
            6 * 0.625 + 12 / 4,
        ),
    ],
)
def test_state_has_the_documented_bytes_per_parameter(
    model: TrainedModel, spec: TrainerSpec, per_parameter: float
) -> None:
    assert memory.state_bytes(model, spec) == per_parameter * BILLION


def test_states_of_trainers_that_share_time_must_fit_together(tmp_path: Path) -> None:
    system = {"trainers": 2, "time_share": True, "workers": 0}
    (problem,) = checked(tmp_path, 4, system, n=1).problems
    assert problem == (
        "trainer.offload: 2 trainers use a GPU of 79.6 GiB in turns. One of a job like this needs 59.6 GiB while it "
        "trains, and each of the others keeps 44.7 GiB: set it to all"
    )
    assert checked(tmp_path, 4, system, n=1, trainer={"offload": "all"}) == Fit([], [])
    assert checked(tmp_path, 2, system, n=1).problems == []


@pytest.mark.parametrize(("offload", "per_parameter"), [("none", 12), ("optimizer", 4), ("all", 0)])
def test_offload_leaves_the_documented_bytes_while_engines_generate(offload: Any, per_parameter: int) -> None:
    spec = TrainerSpec(offload=offload)
    assert memory.generating_bytes(TrainedModel(BILLION), spec) == per_parameter * BILLION
    assert memory.generating_bytes(TrainedModel(BILLION, n_added=BILLION), spec) == 2 * per_parameter * BILLION


def test_offloaded_optimizer_frees_only_its_share_on_each_gpu() -> None:
    spec = TrainerSpec(
        backend="megatron", dtype="bfloat16", data_parallel=4, distributed_optimizer=True, offload="optimizer"
    )
    assert memory.generating_bytes(TrainedModel(BILLION), spec) == 2 * BILLION


@pytest.mark.parametrize(("dtype", "freed"), [("float32", 12), ("bfloat16", 16)])
def test_megatron_offloads_gradients_with_the_optimizer(dtype: Any, freed: int) -> None:
    model, spec = TrainedModel(BILLION), TrainerSpec(backend="megatron", dtype=dtype, offload="optimizer")
    assert memory.state_bytes(model, spec) - memory.generating_bytes(model, spec) == freed * BILLION


def test_devices_of_a_running_system_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = placed(SystemSpec(gpus="all", tensor_parallel=2), tmp_path, gpus(8)).layout.summary()
    assert summary == DeviceSummary(8, 81559 << 20, 2, int(0.4 * (81559 << 20)), int(0.4 * (81559 << 20)))
    state = StateDir(tmp_path / "state")
    with state.owned():
        state.write_devices(summary)
        state.write_config(Config("http://127.0.0.1:1", "t", "redis://x", str(state.path), 1))
        monkeypatch.delenv("RLBOOST_URL", raising=False)
        assert job_files._devices(state.path) == summary
        monkeypatch.setenv("RLBOOST_URL", "http://10.0.0.5:8700")
        assert job_files._devices(state.path) is None, "the job is for another system"
        monkeypatch.delenv("RLBOOST_URL")
        state.write_devices(None)
        assert job_files._devices(state.path) is None
    assert job_files._devices(state.path) is None
