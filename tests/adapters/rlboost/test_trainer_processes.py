"""Several processes of a trainer of your own: their shards are gathered, and the main one works for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel

from rlboost.publishing import Versions, Weights, gathered, is_sharded, weights_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.torch_tensors import module_tensors
from tests.support.black_box import ROOT
from tests.support.gathered_ranks import policy
from tests.support.ports import reserved_port


def two_processes(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module of `tests.support` in two processes; return the lines that they print."""
    with reserved_port() as port:
        launch = f"torch.distributed.run --nproc-per-node 2 --master-port {port} -m tests.support.{module}".split()
        done = subprocess.run(
            [sys.executable, "-m", *launch, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=200,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(240)
def test_main_process_works_for_all_and_its_error_is_raised_in_all() -> None:
    first, second = sorted(two_processes("main_process_work"), key=lambda line: int(line["rank"]))
    assert first["made"] == second["made"] == "0"
    assert first["error"] == "ConfigError: top_k: is not supported"
    assert second["error"] == "Fatal: the main process: ConfigError: top_k: is not supported"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["fsdp2", "fsdp2-lora", "ddp-lora"])
def test_gathered_weights_are_those_of_one_process(how: str, tmp_path: Path) -> None:
    model = policy("lora" in how)
    expected = weights_of(model)
    with reserved_port() as port:
        launch = (
            f"torch.distributed.run --nproc-per-node 2 --master-port {port} -m tests.support.gathered_ranks".split()
        )
        subprocess.run(
            [sys.executable, "-m", *launch, how, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=200,
        )
    (whole, part), _ = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    tensors, adapter, adapter_json, config_json = whole
    own = expected.model if "lora" in how else dict(module_tensors(model))
    assert tensors.keys() == own.keys()
    assert "lm_head.weight" not in tensors  # tied tensors are published once
    assert all(torch.equal(tensors[name], own[name]) for name in own)
    assert adapter.keys() == expected.adapter.keys()
    assert all(torch.equal(adapter[name], expected.adapter[name]) for name in adapter)
    assert json.loads(config_json) == json.loads(expected.config_json)
    assert adapter_json == expected.adapter_json
    if "lora" in how:
        assert part[0] is None
        assert part[1].keys() == adapter.keys()


@pytest.mark.parametrize("config", ["{", "[]", "null"])
async def test_configuration_that_is_no_object_is_rejected(config: str) -> None:
    versions = Versions(Mock(), "job-1", resume=False, deltas=False, limit_s=1.0)
    with pytest.raises(ConfigError, match=r"config: the model's configuration is not .*: give config\.json"):
        await versions.publish(Weights({}, config), if_changed=False)


def test_shards_of_other_kinds_are_rejected() -> None:
    model = policy(lora=False)
    next(model.parameters()).ds_id = 1
    with pytest.raises(ConfigError, match=r"ZeRO-3 is not supported.*FSDP2"):
        gathered(model)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_shards_of_fsdp1_are_rejected(tmp_path: Path) -> None:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(policy(lora=False), device_id=torch.device("cpu"))
        assert is_sharded(model)
        with pytest.raises(ConfigError, match=r"FSDP1 is not supported.*fsdp_version: 2"):
            gathered(model)
    finally:
        destroy_process_group()
