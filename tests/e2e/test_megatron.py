"""A job that megatron-core trains in two processes: the trainer loses one, and workers get what the two published."""

from __future__ import annotations

import os
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.ranks import ranks_of
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


def test_the_example_is_trained_in_two_processes_one_of_which_is_killed(tmp_path: Path) -> None:
    spec = small_job(steps=4)
    spec["trainer"] |= {"backend": "megatron", "tensor_parallel": 2}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_step(job_id, 2)
            kill_a_rank(box)
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        parts = box.get(f"/v1/jobs/{job_id}/metrics")
        (saved,) = [e["fields"]["path"] for e in box.events(job_id) if e["kind"] == "model_saved"]
        log = (tmp_path / "state" / "logs" / "trainer.log").read_text()
    assert len(parts) == spec["steps"] + 1
    assert (Path(saved) / "model.safetensors").is_file()
    assert "of the trainer ended with code -9" in log
    assert "resumed" in log or any(e["kind"] == "resumed" for e in box.events(job_id))


def kill_a_rank(box: BlackBox) -> None:
    def killed() -> bool:
        for process in box.processes("trainer"):
            for rank in ranks_of(process["pid"])[1:]:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
                    return True
        return False

    box.until(killed, "the trainer has ranks")
