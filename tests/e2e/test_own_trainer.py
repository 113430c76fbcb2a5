"""TRL's `GRPOTrainer`, unmodified, on a fleet whose worker, manager, store and own process are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import RLBOOST, ROOT, BlackBox, Observer, black_box

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

STEPS, SAMPLES = 14, 256


class Trl:
    """The program of a user, and what it has printed."""

    def __init__(self, box: BlackBox, folder: Path) -> None:
        program = [sys.executable, "-m", "tests.support.trl_trainer"]
        options = [box.url, box.token, str(folder), "sums", str(STEPS), str(folder / "checkpoints")]
        log = (folder / "trl.log").open("ab")
        self.process = subprocess.Popen([*program, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
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


def test_trl_trains_on_a_fleet_whatever_dies(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    subprocess.run([*RLBOOST, "init", str(folder)], check=True, capture_output=True)
    with black_box(tmp_path / "state", workers=2, trainers=0) as box:
        first = Trl(box, folder)
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
                second = Trl(box, folder)
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
