"""The processes of a machine that joins with several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlboost.local.node import place, worker_specs
from rlboost.local.processes import ProcessSpec
from rlboost.local.spec_file import NodeSpec
from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError
from tests.support.fake_gpus import gpus

CONNECTION = {"RLBOOST_WORKER_URL": "http://manager:8700", "RLBOOST_TOKEN": "secret"}


def specs(inherited: dict[str, str] | None = None, **given: Any) -> list[ProcessSpec]:
    spec = NodeSpec(gpus="all", **given)
    return worker_specs(spec, place(spec, gpus(4), "node"), StateDir(Path("/s")), CONNECTION, inherited or {}, 32)


def test_node_starts_one_worker_per_group_of_gpus() -> None:
    found = specs(tensor_parallel=2)
    assert [(spec.name, spec.gpus, spec.role) for spec in found] == [
        ("node-1", "0,1", "preemptible"),
        ("node-2", "2,3", "preemptible"),
    ]
    assert found[1].env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "8",
        "RLBOOST_TOKEN": "secret",
        "RLBOOST_WORKER_DEVICE": "cuda",
        "RLBOOST_WORKER_DTYPE": "bfloat16",
        "RLBOOST_WORKER_ENGINE": "vllm",
        "RLBOOST_WORKER_NAME": "node-2",
        "RLBOOST_WORKER_ROLE": "preemptible",
        "RLBOOST_WORKER_TENSOR_PARALLEL": "2",
        "RLBOOST_WORKER_URL": "http://manager:8700",
    }
    assert "secret" not in repr(found)
    assert not any(spec.restart_after_success for spec in found)


def test_reserved_workers_leave_memory_to_the_trainer() -> None:
    fractions = [spec.env["RLBOOST_WORKER_GPU_MEMORY_UTILIZATION"] for spec in specs(role="reserved")]
    assert fractions == ["0.4"] * 4


def test_each_worker_has_its_own_port() -> None:
    inherited = {"RLBOOST_WORKER_PORT": "8703", "RLBOOST_WORKER_HOST": "0.0.0.0"}
    assert [spec.env["RLBOOST_WORKER_PORT"] for spec in specs(inherited)] == ["8703", "8704", "8705", "8706"]


def test_setting_for_one_worker_is_refused_for_several() -> None:
    with pytest.raises(ConfigError, match="RLBOOST_WORKER_PEER_URL is the URL of one worker, and this machine has 4"):
        specs({"RLBOOST_WORKER_PEER_URL": "http://10.0.0.1:8703"})
    assert specs({"RLBOOST_WORKER_PEER_URL": "off"})
