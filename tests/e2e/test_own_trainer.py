"""TRL's trainers, unmodified, on a fleet whose worker, manager and store are killed, and a trainer too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.black_box import RLBOOST, ROOT, BlackBox, Observer, black_box
from tests.support.ports import reserved_port

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

STEPS, SAMPLES = 14, 256


class Trl:
    """The program of a user, and what it has printed."""

    def __init__(self, module: str, folder: Path, *options: str) -> None:
        program = [sys.executable, "-m", f"tests.support.{module}", *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
        with (folder / "trl.log").open("ab") as log:
            self.process = subprocess.Popen(
                program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.said: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with suppress(ValueError):  # a progress bar
                    self.said.append(json.loads(line))

    def rollouts(self) -> list[dict[str, Any]]:
        return [line for line in self.said if "gap" in line]

    def until_next_rollout(self, box: BlackBox) -> None:
        before = len(self.rollouts())
        box.until(lambda: len(self.rollouts()) > before, "a further rollout")

    def end(self, limit_s: float = 240) -> int:
        code = self.process.wait(limit_s)
        self._thread.join()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.end()


def folder_of_sums(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    subprocess.run([*RLBOOST, "init", str(folder)], check=True, capture_output=True)
    return folder


def test_trl_trains_on_a_fleet_whatever_dies(tmp_path: Path) -> None:
    folder = folder_of_sums(tmp_path)
    with black_box(tmp_path / "state", workers=2, trainers=0) as box:
        options = [box.url, box.token, str(folder), "sums", str(STEPS), str(folder / "checkpoints")]
        first = Trl("trl_trainer", folder, *options)
        try:
            box.until(lambda: len(first.rollouts()) >= 2, "two rollouts")
            job_id = first.rollouts()[0]["job"]
            with closing(Observer(box.redis_url, job_id)) as observer:
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


def test_async_trl_trains_by_one_url_while_worker_and_manager_die(tmp_path: Path) -> None:
    folder = folder_of_sums(tmp_path)
    with reserved_port() as port, black_box(tmp_path / "state", workers=2, trainers=0) as box:
        url = f"http://127.0.0.1:{port}"
        gateway = box.start("gateway", str(folder / "model"), "--job", "sums", "--port", str(port))
        trl = None
        try:
            box.until(lambda: answers(url), "the gateway")
            trl = Trl("trl_async_trainer", folder, url, str(folder), "8")
            (job,) = box.get("/v1/jobs")
            for version, role in ((1, "preemptible"), (3, "manager")):
                box.until_step(job["id"], version)
                box.kill(role)
            assert trl.end() == 0, (folder / "trl.log").read_text()[-3000:]
            audit = box.get(f"/v1/jobs/{job['id']}/audit")["serving"]
        finally:
            gateway.kill()
            gateway.communicate()
            if trl is not None:
                trl.process.kill()
    assert audit["requested"] == audit["delivered"] + sum(audit["dropped"].values())
    assert all(reason.startswith("the client") for reason in audit["dropped"]), audit  # TRL's last requests
    logged = trl.said[-1]["logged"]
    assert len(logged) == 8
    assert logged[0]["kl"] < 1e-6  # the weights are those that sampled
    assert sum(row["reward"] for row in logged[-2:]) > sum(row["reward"] for row in logged[:2])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False
