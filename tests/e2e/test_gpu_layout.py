"""`rlboost up cluster.yaml` on a machine whose `nvidia-smi` lists two GPUs: real services, engines on the CPU.

Workers with vLLM are started as programs, so the kernel shows their environment; forked ones hide it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlboost.client import Client
from rlboost.local import doctor
from rlboost.shared.ids import worker_name
from tests.support import fake_gpus, vllm_engines
from tests.support.black_box import RLBOOST, ROOT
from tests.support.eventually import eventually
from tests.support.ports import reserved_port

pytestmark = pytest.mark.timeout(600)

CLUSTER = """
gpus: 0-1
trainer_gpus: 0
reserved: 1
workers: 1
engine: vllm
gpu_memory_utilization: 0.3
host: 127.0.0.2
env: {RLBOOST_WORKER_DEVICE: cpu, RLBOOST_TRAINER_DEVICE: cpu, RLBOOST_WORKER_SLOTS: 4}
"""


def environment(pid: int) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)


@pytest.mark.long
async def test_up_with_a_cluster_file_gives_each_process_its_gpus(tmp_path: Path) -> None:
    vllm_engines.require_installed()
    path = f"{fake_gpus.install(tmp_path / 'bin', 2)}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT)}
    file, state = tmp_path / "cluster.yaml", f"--state={tmp_path / 'state'}"
    with reserved_port() as port, reserved_port() as weight_store_port, reserved_port() as redis_port:
        ports = f"port: {port}\nweight_store_port: {weight_store_port}\nredis_port: {redis_port}\n"
        file.write_text(CLUSTER + ports)

    def rlboost(*arguments: str) -> str:
        command = [*RLBOOST, *arguments, state]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        config = json.loads(rlboost("up", str(file), "--detach", "--json"))
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
        assert config["url"] == f"http://127.0.0.2:{port}"
        with Client(config["url"], config["token"]) as client:
            await join_and_drain(tmp_path, env, client.workers.list)
        checks = await asyncio.to_thread(lambda: list(doctor.system_findings(config["url"], config["token"])))
        assert [check.name for check in checks if check.status == "ok"] == ["manager", "clock", "weight store", "redis"]
    finally:
        rlboost("down")


async def join_and_drain(tmp_path: Path, env: dict[str, str], workers: Callable[[], list[dict[str, Any]]]) -> None:
    """Join with one worker per GPU, kill one, which comes back, and drain both by one SIGTERM."""
    command = [*RLBOOST, "worker", "join", "--gpus=all", "--engine=torch", "--name=node", f"--state={tmp_path}/state"]
    settings = {"RLBOOST_WORKER_DEVICE": "cpu", "RLBOOST_WORKER_CACHE_DIR": str(tmp_path / "cache")}

    def joined() -> dict[str, int]:
        return {worker_name(w["id"]): w["pid"] for w in workers() if w["state"] not in {"lost", "left"}}

    with (tmp_path / "node.log").open("w+") as log:
        node = subprocess.Popen(  # noqa: ASYNC220 - starting it is quick
            command, cwd=tmp_path, env={**env, **settings}, stdout=log, stderr=log
        )
        try:
            await eventually(lambda: {"node-1", "node-2"} <= joined().keys(), every_s=0.2)
            first = joined()
            for name, gpu in (("node-1", "0"), ("node-2", "1")):
                assert environment(first[name])["CUDA_VISIBLE_DEVICES"] == gpu
            os.kill(first["node-1"], signal.SIGKILL)
            await eventually(lambda: joined().get("node-1", first["node-1"]) != first["node-1"], every_s=0.2)
            node.terminate()
            assert node.wait(60) == 0, (tmp_path / "node.log").read_text()
            await eventually(lambda: not {"node-1", "node-2"} & joined().keys())
        finally:
            node.kill()
            node.wait()


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
