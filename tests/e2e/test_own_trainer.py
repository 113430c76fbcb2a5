"""TRL's trainers, unmodified, on a fleet whose worker, manager and store are killed, and a trainer too.

With one process and the whole model, and with two processes and an adapter (PEFT).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.support.black_box import RLBOOST, ROOT, BlackBox, Observer, black_box, start_forked
from tests.support.ports import reserved_port
from tests.support.said import FOLDER, said

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

STEPS, SAMPLES, GROUP = 14, 256, 8
PROCESSES, OF_PROCESS = 2, 60
"""Completions of each process in a step: no multiple of a group's, so that one lies across both."""


class Trl:
    """The program of a user, and what it has printed."""

    def __init__(self, module: str, folder: Path, *options: str, launcher: Sequence[str] = ("-m",)) -> None:
        program = [sys.executable, *launcher, f"tests.support.{module}", *options]
        self._folder = Path(tempfile.mkdtemp(prefix="said-", dir=folder))
        path = os.pathsep.join([str(ROOT), str(folder)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", FOLDER: str(self._folder)}
        with (folder / "trl.log").open("ab") as log:
            self.process = subprocess.Popen(program, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def said(self) -> list[dict[str, Any]]:
        return said(self._folder)

    def rollouts(self) -> list[dict[str, Any]]:
        return [line for line in self.said if "gap" in line]

    def until_next_rollout(self, box: BlackBox) -> None:
        before = len(self.rollouts())
        box.until(lambda: len(self.rollouts()) > before, "a further rollout")

    def end(self, limit_s: float = 240) -> int:
        return self.process.wait(limit_s)

    def kill(self) -> None:
        """Kill all its processes, as the loss of their machine does."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.end()


def job_of(box: BlackBox) -> str:
    """Return the id of the program's job as soon as it exists, so that an observer misses none of its samples."""
    box.until(lambda: box.get("/v1/jobs"), "the job")
    (job,) = box.get("/v1/jobs")
    return str(job["id"])


def folder_of_sums(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    subprocess.run([*RLBOOST, "init", str(folder)], check=True, capture_output=True)
    return folder


def test_trl_trains_on_a_fleet_whatever_dies(tmp_path: Path) -> None:
    folder = folder_of_sums(tmp_path)
    with black_box(tmp_path / "state", workers=2, trainers=0) as box:
        options = [box.url, box.token, str(folder), "sums", str(STEPS), str(folder / "checkpoints"), str(SAMPLES)]
        first = Trl("trl_trainer", folder, *options)
        try:
            job_id = job_of(box)
            with closing(Observer(box.redis_url, job_id)) as observer:
                box.until(lambda: len(first.rollouts()) >= 2, "two rollouts")
                for role in ("preemptible", "manager", "weight_store"):
                    box.kill(role)
                    first.until_next_rollout(box)
                at = first.rollouts()[-1]["step"]
                box.until((folder / f"checkpoints/checkpoint-{at}").exists, "a checkpoint")
                first.kill()
                second = Trl("trl_trainer", folder, *options)
                assert second.end() == 0, (folder / "trl.log").read_text()[-3000:]
            samples = observer.check()
        finally:
            first.process.kill()
        job = box.get(f"/v1/jobs/{job_id}")
        audit = box.get(f"/v1/jobs/{job_id}/audit")
    assert job["state"] == "completed"
    assert {line["job"] for line in second.rollouts()} == {job_id}
    rollouts = first.rollouts() + second.rollouts()
    assert max(line["gap"] for line in rollouts) < 1e-4
    # The step in which the trainer died is sampled once: its successor has the same weights and gets the same tokens.
    by_version: dict[int, list[Any]] = {}
    for line in rollouts:
        assert by_version.setdefault(line["version"], line["tokens"]) == line["tokens"]
    assert len(by_version) == len({line["step"] for line in rollouts}) == STEPS
    assert audit["requested"] == audit["delivered"] == STEPS * SAMPLES
    assert audit["dropped"] == {}
    assert samples <= STEPS * SAMPLES
    rewards = second.said[-1]["rewards"]
    assert len(rewards) == STEPS
    assert sum(rewards[-4:]) > sum(rewards[:4])


def test_trl_in_two_processes_trains_an_adapter_whatever_dies(tmp_path: Path) -> None:
    folder, steps = folder_of_sums(tmp_path), 8
    with reserved_port() as port, black_box(tmp_path / "state", workers=2, trainers=0) as box:
        options = [box.url, box.token, str(folder), "sums", str(steps), str(folder / "checkpoints"), str(OF_PROCESS)]
        launch = f"accelerate.commands.launch --multi_gpu --num_processes {PROCESSES} --main_process_port {port}"
        launcher = ["-m", *launch.split(), "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "-m"]
        first = Trl("trl_trainer", folder, *options, "lora", launcher=launcher)
        try:
            job_id = job_of(box)
            with closing(Observer(box.redis_url, job_id)) as observer:
                box.until(lambda: len(first.rollouts()) >= 2 * PROCESSES, "two rollouts of both processes")
                for role in ("preemptible", "manager"):
                    box.until_busy(job_id)
                    box.kill(role)
                    first.until_next_rollout(box)
                at = max(line["step"] for line in first.rollouts())
                box.until((folder / f"checkpoints/checkpoint-{at}").exists, "a checkpoint")
                first.kill()
                second = Trl("trl_trainer", folder, *options, "lora", launcher=launcher)
                assert second.end() == 0, (folder / "trl.log").read_text()[-3000:]
            samples = observer.check()
        finally:
            if first.process.poll() is None:
                first.kill()
        audit = box.get(f"/v1/jobs/{job_id}/audit")
        assert box.get(f"/v1/jobs/{job_id}")["state"] == "completed"
    rollouts = first.rollouts() + second.rollouts()
    assert max(line["gap"] for line in rollouts) < 1e-4  # TRL keeps adapter and model apart, workers merge them
    by_step: dict[tuple[int, int], str] = {}
    for line in rollouts:
        assert by_step.setdefault((line["rank"], line["step"]), line["tokens"]) == line["tokens"]
    assert len(by_step) == PROCESSES * steps
    # Version 0 is the model, and each later one an adapter.
    assert {line["version"] for line in rollouts if not line["rank"]} == set(range(1, steps + 1))
    assert audit["requested"] == audit["delivered"] == steps * PROCESSES * OF_PROCESS
    assert (audit["dropped"], audit["duplicates"]) == ({}, 0)
    assert samples <= audit["delivered"]
    (made, other) = ({**line, "rank": 0} for line in second.said if "advantages" in line)
    assert made == other
    # Both processes know the rewards of whole groups, also of the one that lies across them.
    rewards = np.array(made["scores"]).reshape(-1, GROUP)
    assert all(len(set(group)) == 1 for group in np.array(made["prompts"]).reshape(-1, GROUP).tolist())
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    assert made["advantages"] == pytest.approx(expected.ravel().tolist(), abs=1e-3)
    assert expected.any()


def test_trl_samples_with_the_weights_of_fsdp2_shards(tmp_path: Path) -> None:
    folder, steps = folder_of_sums(tmp_path), 3
    with reserved_port() as port, black_box(tmp_path / "state", workers=2, trainers=0) as box:
        options = [box.url, box.token, str(folder), "sums", str(steps), str(folder / "unused"), str(OF_PROCESS)]
        launch = f"torch.distributed.run --nproc-per-node {PROCESSES} --master-port {port} -m"
        trl = Trl("trl_trainer", folder, *options, "fsdp2", launcher=["-m", *launch.split()])
        try:
            assert trl.end() == 0, (folder / "trl.log").read_text()[-3000:]
        finally:
            if trl.process.poll() is None:
                trl.kill()
        (job,) = box.get("/v1/jobs")
        audit = box.get(f"/v1/jobs/{job['id']}/audit")
    assert len(trl.rollouts()) == steps * PROCESSES
    assert max(line["gap"] for line in trl.rollouts()) < 1e-4
    assert audit["requested"] == audit["delivered"] == steps * PROCESSES * OF_PROCESS


@pytest.mark.parametrize("kind", [[], ["lora"], ["adapter"]], ids=["whole", "lora", "adapter"])
def test_async_trl_trains_by_one_url_while_worker_and_manager_die(kind: list[str], tmp_path: Path) -> None:
    folder = folder_of_sums(tmp_path)
    # Workers merge an adapter in the dtype of the folder, and the trainer trains in float32.
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32").save_pretrained(folder / "model")
    with reserved_port() as port, black_box(tmp_path / "state", workers=2, trainers=0) as box:
        url = f"http://127.0.0.1:{port}"
        arguments = (str(folder / "model"), "--job", "sums", "--port", str(port), "--state", str(box.state))
        gateway = start_forked("gateway", *arguments, log=tmp_path / "gateway.log")
        trl = None
        try:
            box.until(lambda: answers(url), "the gateway")
            trl = Trl("trl_async_trainer", folder, url, str(folder), "8", *kind)
            (job,) = box.get("/v1/jobs")
            for version, role in ((1, "preemptible"), (3, "manager")):
                box.until_step(job["id"], version)
                box.kill(role)
            assert trl.end() == 0, (folder / "trl.log").read_text()[-3000:]
            # TRL's last requests end once the manager has noticed that their client is gone.
            box.until(lambda: all_ended(box, job["id"]), "the end of all requests", within_s=60)
            audit = box.get(f"/v1/jobs/{job['id']}/audit")["serving"]
        finally:
            gateway.kill()
            gateway.wait()
            if trl is not None:
                trl.process.kill()
    assert all(reason.startswith("the client") for reason in audit["dropped"]), audit
    logged = trl.said[-1]["logged"]
    assert len(logged) == 8
    assert logged[0]["kl"] < 1e-6  # the weights are those that sampled
    assert trl.said[-1]["gap"] < 1e-4
    assert sum(row["reward"] for row in logged[-2:]) > sum(row["reward"] for row in logged[:2])


def all_ended(box: BlackBox, job_id: str) -> bool:
    audit = box.get(f"/v1/jobs/{job_id}/audit")["serving"]
    return bool(audit["requested"] == audit["delivered"] + sum(audit["dropped"].values()))


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False
