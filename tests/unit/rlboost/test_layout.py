"""The layouts of the paper and of the shipped files, and layouts that are not possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlboost.local.layout import Gpu, Layout, Placement, environment, plan_workers
from rlboost.local.processes import LocalOptions
from rlboost.local.spec_file import NodeSpec, SystemSpec, load, placed
from rlboost.shared.errors import ConfigError, Conflict
from tests.support.fake_gpus import gpus

CLUSTERS = Path(__file__).parents[3] / "deploy" / "clusters"


def options(n: int, **given: Any) -> LocalOptions:
    return placed(load(SystemSpec, None, {"gpus": "all", **given}), Path("/state"), gpus(n))


def shown(layout: Layout) -> dict[str, str]:
    return {name: placement.shown for name, placement in layout.placements.items()}


def test_paper_layout_shares_all_gpus_between_trainer_and_engines() -> None:
    spec = load(SystemSpec, CLUSTERS / "reserved-8gpu.yaml", {"host": "10.0.0.5"})
    found = placed(spec, Path("/state"), gpus(8))
    assert shown(found.layout) == {
        "trainer": "0,1,2,3,4,5,6,7",
        "reserved-1": "0,1",
        "reserved-2": "2,3",
        "reserved-3": "4,5",
        "reserved-4": "6,7",
    }
    assert {found.layout.placements[f"reserved-{i}"].memory_fraction for i in (1, 2, 3, 4)} == {0.4}
    assert (found.engine, found.host, found.workers) == ("vllm", "10.0.0.5", 0)
    assert (found.port, found.weight_store_port, found.redis_port) == (8700, 8701, 6379)


@pytest.mark.parametrize(
    ("file", "n", "found"),
    [
        ("spot-1gpu.yaml", 1, {"node": "0"}),
        ("spot-2gpu.yaml", 2, {"node": "0,1"}),
        ("spot-8gpu.yaml", 8, {"node-1": "0,1", "node-2": "2,3", "node-3": "4,5", "node-4": "6,7"}),
    ],
)
def test_spot_file_starts_one_worker_per_group(file: str, n: int, found: dict[str, str]) -> None:
    spec = load(NodeSpec, CLUSTERS / file, {})
    assert (spec.gpus, spec.engine, spec.role) == ("all", "vllm", "preemptible")
    assert shown(plan_workers(gpus(n), "node", tensor_parallel=spec.tensor_parallel)) == found


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_file_can_be_placed_on_the_machine_that_it_names(file: Path) -> None:
    n = int(file.stem.rpartition("-")[2].removesuffix("gpu"))
    if file.stem.startswith("spot"):
        assert plan_workers(gpus(n), "node", tensor_parallel=load(NodeSpec, file, {}).tensor_parallel).placements
    else:
        found = placed(load(SystemSpec, file, {}), Path("/state"), gpus(n)).layout
        assert {gpu for placement in found.placements.values() for gpu in placement.gpus} == set(gpus(n))


def test_gpus_alone_give_a_colocated_system() -> None:
    found = options(4, tensor_parallel=2)
    assert shown(found.layout) == {"trainer": "0,1,2,3", "reserved-1": "0,1", "reserved-2": "2,3"}
    assert (found.engine, found.workers) == ("vllm", 0)


def test_preemptible_workers_get_gpus_that_no_trainer_uses() -> None:
    found = shown(options(4, workers=2).layout)
    assert found == {"trainer": "0,1", "reserved-1": "0", "reserved-2": "1", "worker-1": "2", "worker-2": "3"}


def test_trainers_divide_their_gpus_and_their_reserved_workers_follow() -> None:
    found = shown(options(4, trainers=2, reserved=4).layout)
    assert found == {
        "trainer-1": "0,1",
        "trainer-2": "2,3",
        "reserved-1": "0",
        "reserved-3": "1",
        "reserved-2": "2",
        "reserved-4": "3",
    }


def test_trainers_that_share_time_have_the_same_gpus_and_no_reserved_workers() -> None:
    found = options(4, trainers=2, time_share=True, workers=2)
    assert shown(found.layout) == {"trainer-1": "0,1", "trainer-2": "0,1", "worker-1": "2", "worker-2": "3"}
    assert (found.time_share, found.reserved) == (True, 0)
    summary = found.layout.summary()
    assert summary is not None
    assert (summary.n_time_sharing, summary.trainer_gpus) == (2, 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"trainers": 1}, "--time-share: the only trainer has its device alone: set trainers to 2 or more, not 1"),
        ({"trainers": 0}, "set trainers to 2 or more, not 0"),
        ({"trainers": 2, "reserved": 1}, "--reserved: a reserved worker of one job would generate on the device while"),
    ],
)
def test_time_sharing_that_is_not_possible_names_the_option_to_change(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(SystemSpec, None, {"time_share": True, **given})


def test_engines_on_one_gpu_divide_the_engines_memory() -> None:
    found = options(2, reserved=3, gpu_memory_utilization=0.6).layout.placements
    assert {name: found[name].memory_fraction for name in ("reserved-1", "reserved-2", "reserved-3")} == {
        "reserved-1": 0.3,
        "reserved-2": 0.6,
        "reserved-3": 0.3,
    }


def test_joining_worker_gets_a_group_that_is_not_in_use() -> None:
    layout = options(4, trainer_gpus="0", workers=1).layout
    first = layout.free_group(layout.placements.values())
    assert first.shown == "2"
    second = layout.free_group([*layout.placements.values(), first])
    assert second.shown == "3"
    with pytest.raises(Conflict, match="no GPU is free"):
        layout.free_group([*layout.placements.values(), first, second])


def test_environment_names_devices_memory_and_cpus() -> None:
    placement = Placement((Gpu(2, cpus="0-15"), Gpu(3, cpus="0-15")), 0.4)
    assert environment(placement, "RLBOOST_WORKER_", 8, {}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "8",
        "RLBOOST_WORKER_CPUS": "0-15",
        "RLBOOST_WORKER_DEVICE": "cuda",
        "RLBOOST_WORKER_DTYPE": "bfloat16",
        "RLBOOST_WORKER_TENSOR_PARALLEL": "2",
        "RLBOOST_WORKER_GPU_MEMORY_UTILIZATION": "0.4",
    }
    trainer = environment(placement, "RLBOOST_TRAINER_", 8, {})
    assert {name for name in trainer if name.startswith("RLBOOST")} == {
        "RLBOOST_TRAINER_DEVICE",
        "RLBOOST_TRAINER_CPUS",
    }


def test_users_settings_win_over_the_layouts_except_for_its_gpus() -> None:
    inherited = {"RLBOOST_WORKER_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    found = environment(Placement((Gpu(2),)), "RLBOOST_WORKER_", 8, inherited)
    assert "RLBOOST_WORKER_DEVICE" not in found
    assert "OMP_NUM_THREADS" not in found
    assert found["CUDA_VISIBLE_DEVICES"] == "2"


def test_threads_divide_the_cpus_by_uses_of_gpus() -> None:
    assert options(8, tensor_parallel=2).layout.threads(192) == 12
    assert options(8).layout.threads(2) == 1
    assert options(1, reserved=0).layout.threads(192) == 16


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpus": "0-9"}, "--gpus '0-9': there is no GPU 8"),
        (
            {"gpus": "0-3", "trainer_gpus": "0-7"},
            "--trainer-gpus '0-7': there is no GPU 4 to use; there are: 0, 1, 2, 3",
        ),
        ({"trainers": 3}, "3 trainers cannot divide 8 GPUs evenly"),
        (
            {"trainer_gpus": "0", "tensor_parallel": 2, "reserved": 1},
            "--tensor-parallel 2 is more than the 1 GPU of tr",
        ),
        ({"workers": 5, "trainer_gpus": "0-3"}, "5 spot workers with 1 GPU each do not fit on the 4 GPUs"),
        ({"workers": 8}, "the spot workers leave no GPU to the trainer"),
    ],
)
def test_impossible_layout_names_the_option_to_change(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options(8, **given)


def test_workers_of_a_node_need_a_divisor() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel 3 does not divide 8 GPUs"):
        plan_workers(gpus(8), "node", tensor_parallel=3)


def test_file_with_unknown_key_suggests_the_right_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus: 0\nreservd: 1\n")
    with pytest.raises(ConfigError, match=r"reservd: unknown key: did you mean reserved\?"):
        load(SystemSpec, file, {})
    file.write_text("gpus: 0\ngpus: 1\n")
    with pytest.raises(ConfigError, match="given twice"):
        load(SystemSpec, file, {})


@pytest.mark.parametrize(
    ("file", "why"),
    [(".", "Is a directory: name a file"), ("https://host:1", "is a URL, not a file: give it with --url")],
)
def test_what_is_no_file_is_refused(file: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(SystemSpec, Path(file), {})


def test_host_is_one_address_and_this_machine_alone_by_default() -> None:
    assert options(1).host == "127.0.0.1"
    assert options(1).redis_port == 0
    for host in "0.0.0.0", "my-machine":
        with pytest.raises(ConfigError, match=r"^--host: "):
            load(SystemSpec, None, {"host": host})


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus: 0\nreserved: 2\nenv: {RLBOOST_WORKER_SLOTS: 8}\n")
    spec = load(SystemSpec, file, {"reserved": 3, "workers": None})
    assert (spec.gpus, spec.reserved, spec.workers, spec.env) == ("0", 3, None, {"RLBOOST_WORKER_SLOTS": "8"})


def test_tensor_parallel_without_gpus_or_vllm_is_refused() -> None:
    for given, why in ({}, "needs GPUs"), ({"gpus": "0-1", "engine": "torch"}, "needs --engine vllm"):
        with pytest.raises(ConfigError, match=why):
            load(SystemSpec, None, {"tensor_parallel": 2, **given}).require_engine()


def test_engine_arguments_become_a_setting_of_vllm_workers() -> None:
    spec = load(SystemSpec, None, {"engine": "vllm", "vllm_args": {"max_num_batched_tokens": 8192}})
    env = placed(spec, Path("/state"), []).env
    assert env == {"RLBOOST_WORKER_VLLM_ARGS": '{"max_num_batched_tokens": 8192}'}
    with pytest.raises(ConfigError, match="vllm_args needs the vllm engine"):
        load(SystemSpec, None, {"vllm_args": {"a": 1}}).require_engine()


def test_autoscaling_leaves_the_trainer_the_gpus_of_no_possible_worker() -> None:
    found = options(8, workers=1, autoscale=3)
    assert [placement.shown for placement in found.layout.worker_groups] == ["5", "6", "7"]
    assert found.layout.placements["trainer"].shown == "0,1,2,3,4"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"workers": 4, "autoscale": 3}, "--workers 4 is more than --autoscale 3"),
        ({"trainer_gpus": "0-5", "autoscale": 3}, "which have room for 2 workers"),
        ({"env": {"RLBOOST_MANAGER_POOLS": "[]"}, "autoscale": 3}, "--autoscale sets RLBOOST_MANAGER_POOLS"),
    ],
)
def test_autoscaling_that_cannot_work_names_the_option_to_change(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options(8, **given)
