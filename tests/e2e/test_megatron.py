"""Jobs trained by two ranks, with megatron-core or FSDP2: each rank publishes its part; one is killed."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from rlboost.shared.weights.rest_models import NONCE_FILE
from tests.support.black_box import Observer, black_box
from tests.support.killed_rank import events_with_a_killed_rank
from tests.support.megatron_cpu import python_path
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_megatron_job_of_two_ranks_survives_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    spec = small_job(steps=6, elastic={"weights": "delta"})
    spec["trainer"] |= {"backend": "megatron", "tensor_parallel": 2, "dtype": "bfloat16"}
    # As with large models, few of the rounded values change in a step.
    spec["optimizer"]["lr"] = 1e-6
    with black_box(tmp_path / "state", workers=1) as box:
        (box.state / "weights" / NONCE_FILE).unlink()  # its worker pulls as on another machine
        events = events_with_a_killed_rank(box, spec)
        logs = {log.stem: log.read_text() for log in (tmp_path / "state" / "logs").glob("*.log")}
    (saved,) = [event["fields"]["path"] for event in events if event["kind"] == "model_saved"]
    assert (Path(saved) / "model.safetensors").is_file()
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
