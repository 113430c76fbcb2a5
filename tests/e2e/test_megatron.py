"""Jobs trained by two ranks, with megatron-core or FSDP2: each rank publishes its part; one is killed."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rlboost.shared.weights.wire import NONCE_FILE
from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.megatron_cpu import python_path
from tests.support.ranks import ranks_of
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


def test_megatron_job_of_two_ranks_survives_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    spec = small_job(steps=3, elastic={"weights": "delta"})
    spec["trainer"] |= {"backend": "megatron", "tensor_parallel": 2, "dtype": "bfloat16"}
    # As with large models, few of the rounded values change in a step.
    spec["optimizer"]["lr"] = 1e-6
    with black_box(tmp_path / "state", workers=1) as box:
        (box.state / "weights" / NONCE_FILE).unlink()  # its worker pulls as on another machine
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            checkpoint = box.state / "runs" / job_id / "checkpoints" / "step-000002"
            box.until(checkpoint.is_dir, "there is a checkpoint")
            kill_a_rank(box)
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        events = box.events(job_id)
        logs = {log.stem: log.read_text() for log in (tmp_path / "state" / "logs").glob("*.log")}
    (saved,) = [event["fields"]["path"] for event in events if event["kind"] == "model_saved"]
    assert (Path(saved) / "model.safetensors").is_file()
    assert "resumed" in {event["kind"] for event in events}
    assert "rank 1 of the trainer ended with code -9" in logs["trainer"]
    worker = logs["worker-1"]
    assert "delta_failed" not in worker
    assert sum(int(found) for found in re.findall(r'"chunks_delta": (\d+)', worker)) > 0, worker[-2000:]


def test_fsdp_job_of_two_ranks_completes_without_spot_workers(tmp_path: Path) -> None:
    spec = small_job(steps=2)
    spec["trainer"] |= {"data_parallel": 2, "checkpoint_every": 1}
    with black_box(tmp_path / "state", workers=0) as box:
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
        assert audit["migrations"] == 0
        assert {worker["role"] for worker in box.get("/v1/workers")} == {"reserved"}
        (saved,) = [event["fields"]["path"] for event in box.events(job_id) if event["kind"] == "model_saved"]
    assert (Path(saved) / "model.safetensors").is_file()


def kill_a_rank(box: BlackBox) -> None:
    def killed() -> bool:
        for process in box.processes("trainer"):
            for rank in ranks_of(process["pid"])[1:]:
                with suppress(ProcessLookupError):  # it is gone since it was listed
                    os.kill(rank, signal.SIGKILL)
                    return True
        return False

    box.until(killed, "the trainer has ranks")
