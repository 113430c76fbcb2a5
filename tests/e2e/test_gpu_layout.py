"""`rlboost up cluster.yaml` on a machine whose `nvidia-smi` lists two GPUs: real services, engines on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import fake_gpus
from tests.support.black_box import RLBOOST, ROOT

pytestmark = pytest.mark.timeout(600)

CLUSTER = """
gpus: 0-1
trainer_gpus: 0
reserved: 1
workers: 1
engine: torch
gpu_memory_utilization: 0.3
env: {RLBOOST_WORKER_DEVICE: cpu, RLBOOST_TRAINER_DEVICE: cpu, RLBOOST_WORKER_SLOTS: 4}
"""


def environment(pid: int) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)


def test_up_with_a_cluster_file_gives_each_process_its_gpus(tmp_path: Path) -> None:
    path = f"{fake_gpus.install(tmp_path / 'bin', 2)}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT)}
    file, state = tmp_path / "cluster.yaml", f"--state={tmp_path / 'state'}"
    file.write_text(CLUSTER)

    def rlboost(*arguments: str) -> str:
        command = [*RLBOOST, *arguments, state]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        rlboost("up", str(file), "--detach", "--json")
        processes = json.loads(rlboost("ps", "--json"))["processes"]
        found = {process["name"]: environment(process["pid"]) for process in processes}
        assert {process["name"]: process["gpus"] for process in processes if process["gpus"]} == {
            "trainer": "0",
            "reserved-1": "0",
            "worker-1": "1",
        }
        for name, gpu, role in (("reserved-1", "0", "reserved"), ("worker-1", "1", "preemptible")):
            assert found[name]["CUDA_VISIBLE_DEVICES"] == gpu
            assert found[name]["RLBOOST_WORKER_ROLE"] == role
            assert (found[name]["RLBOOST_WORKER_SLOTS"], found[name]["RLBOOST_WORKER_DEVICE"]) == ("4", "cpu")
        assert found["reserved-1"]["RLBOOST_WORKER_GPU_MEMORY_UTILIZATION"] == "0.3"
        assert "RLBOOST_WORKER_GPU_MEMORY_UTILIZATION" not in found["worker-1"]
        assert found["trainer"]["CUDA_VISIBLE_DEVICES"] == "0"
        assert "CUDA_VISIBLE_DEVICES" not in found["manager"]
    finally:
        rlboost("down")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpus", "0-7"], "--gpus '0-7': there is no GPU 2 to use; there are: 0, 1"),
        (["--gpus", "0,0"], "--gpus '0,0' names GPU 0 twice"),
        (["--gpus", "all", "--engine", "torch", "--tensor-parallel", "2"], "needs --engine vllm"),
    ],
)
def test_up_with_an_impossible_layout_starts_nothing(arguments: list[str], why: str, tmp_path: Path) -> None:
    path = f"{fake_gpus.install(tmp_path / 'bin', 2)}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [*RLBOOST, "up", *arguments, "--engine=torch", f"--state={tmp_path / 'state'}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**inherited, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "state").exists()
