"""Tinker's client, unmodified, learns on a fleet whose workers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.black_box import RLBOOST, ROOT, BlackBox, black_box, start_forked
from tests.support.ports import reserved_port

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
pytest.importorskip("tinker")

SFT_STEPS, RL_STEPS, GROUPS, SAMPLES = 4, 6, 32, 8


@contextmanager
def serving(box: BlackBox, model: Path, port: int, log: Path) -> Iterator[str]:
    arguments = (str(model), "--job", "sums", "--port", str(port), "--state", str(box.state))
    process = start_forked("tinker", *arguments, log=log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        box.until(answers, "the service answers")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_loops_of_tinkers_client_learn_while_workers_die(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    subprocess.run([*RLBOOST, "init", str(folder)], check=True, capture_output=True)
    # In bfloat16, a merged adapter is rounded so much that log-probabilities show little.
    whole: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    whole.save_pretrained(folder / "model")
    lines: list[dict[str, Any]] = []
    with (
        reserved_port() as port,
        black_box(tmp_path / "state", workers=2, reserved=0, trainers=0) as box,
        serving(box, folder / "model", port, tmp_path / "tinker.log") as url,
        (tmp_path / "loops.log").open("wb") as log,
    ):
        options = [url, str(folder), str(SFT_STEPS), str(RL_STEPS)]
        command = [sys.executable, "-m", "tests.support.tinker_loops", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        (job,) = box.get("/v1/jobs")
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as program:
            try:
                for line in program.stdout or ():
                    lines.append(json.loads(line))
                    if lines[-1]["kind"] == "rl" and lines[-1]["step"] in {0, 2}:
                        box.until_busy(job["id"])
                        box.kill("preemptible")
                assert program.wait(60) == 0, (tmp_path / "loops.log").read_text()[-3000:]
            finally:
                program.kill()
        audit = box.get(f"/v1/jobs/{job['id']}/audit")
    losses = [line["loss"] for line in lines if line["kind"] == "sft"]
    rewards = [line["reward"] for line in lines if line["kind"] == "rl"]
    assert (len(losses), len(rewards)) == (SFT_STEPS, RL_STEPS)
    assert losses[-1] < losses[0] - 0.5
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1
    # Workers merge the adapter into the model, the trainer computes both one after the other.
    assert max(line["gap"] for line in lines if line["kind"] == "rl") < 1e-3
    assert audit["requested"] == audit["delivered"] == RL_STEPS * GROUPS * SAMPLES
    assert audit["dropped"] == {}
    assert sum(audit["tokens_regenerated"].values()) < audit["tokens_generated"]
