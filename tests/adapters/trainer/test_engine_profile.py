"""Traces of what ranks compute, read back as a viewer does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.torch import engine, policy
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import OptimizerSpec
from tests.support import rank_policies
from tests.support.training_rows import rows

pytestmark = pytest.mark.timeout(300)

OPTIMIZER = OptimizerSpec(lr=1e-3)
BATCHES = [rows(3, seed=1), rows(2, seed=2)]


def names_in(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


@pytest.fixture
def one(tmp_path: Path) -> TorchPolicy:
    made = TorchPolicy(PolicySettings(optimizer=OPTIMIZER), device="cpu")
    made.load_hf(rank_policies.write(tmp_path / "model", "qwen3"))
    return made


def test_trace_has_the_passes_and_the_update(one: TorchPolicy, tmp_path: Path) -> None:
    assert one.start_profile(tmp_path / "profile/step-0") == []
    one.accumulate(BATCHES, PolicyLoss())
    one.step(1e-3)
    assert one.stop_profile() == []
    [trace] = (tmp_path / "profile/step-0").iterdir()
    assert trace.name == "rank-0.json.gz"
    assert {"aten::mm", "aten::embedding_dense_backward"} <= names_in(trace)
    assert any("AdamW" in name or "addcdiv" in name for name in names_in(trace))
    assert one.stop_profile() == [], "nothing is recorded any more"


def test_each_rank_has_a_trace_and_results_stay(one: TorchPolicy, tmp_path: Path) -> None:
    parallel: dict[str, Any] = {"backend": "torch", "data_parallel": 2}
    with rank_policies.policy(OPTIMIZER, **parallel) as many:
        many.load_hf(tmp_path / "model")
        assert many.start_profile(tmp_path / "traces") == []
        found = many.accumulate(BATCHES, PolicyLoss())["loss"]
        many.step(1e-3)
        assert many.stop_profile() == []
    assert found == pytest.approx(one.accumulate(BATCHES, PolicyLoss())["loss"], rel=1e-4)
    assert sorted(trace.name for trace in (tmp_path / "traces").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    assert all("aten::mm" in names_in(trace) for trace in (tmp_path / "traces").iterdir())


def test_profile_is_limited_in_micro_batches_and_bytes(
    one: TorchPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "PROFILED_BATCHES", 2)
    one.start_profile(tmp_path / "traces")
    one.accumulate(BATCHES, PolicyLoss())
    one.step(1e-3)
    assert one.stop_profile() == []
    names = names_in(tmp_path / "traces/rank-0.json.gz")
    assert "aten::mm" in names
    assert not any("addcdiv" in name for name in names), "the update comes after the limit"
    monkeypatch.setattr(engine, "MAX_TRACE_BYTES", 10)
    one.start_profile(tmp_path / "more")
    one.accumulate(BATCHES[:1], PolicyLoss())
    [problem] = one.stop_profile()
    assert problem.startswith("the trace of rank 0 had ")
    assert not list((tmp_path / "more").iterdir())


def test_unwritable_folder_is_a_problem_not_an_error(one: TorchPolicy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one.start_profile(tmp_path / "file/step-0")
    one.accumulate(BATCHES[:1], PolicyLoss())
    [problem] = one.stop_profile()
    assert problem.startswith("the trace of rank 0 cannot be written: ")
