"""A job whose ranks are on two machines that join its trainer; one is killed."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.black_box import Observer, black_box
from tests.support.ports import reserved_port
from tests.support.small_job import check, small_job
from tests.support.trainer_machines import MachineProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_job_on_two_machines_loses_no_sample_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_job(steps=6)
    spec["trainer"] |= {"data_parallel": 2, "nodes": 2, "checkpoint_every": 1}
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        monkeypatch.setenv("RLBOOST_TRAINER_MACHINES_PORT", str(port))
        box = stack.enter_context(black_box(tmp_path / "state", workers=1))

        def join(name: str) -> MachineProcess:
            machine = MachineProcess(f"tcp://127.0.0.1:{port}", name, tmp_path / f"{name}.log", token=box.token)
            stack.callback(machine.stop, signal.SIGKILL)
            return machine

        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            _, second = join("a"), join("b")
            checkpoint = box.state / "runs" / job_id / "checkpoints" / "step-000002"
            box.until(checkpoint.is_dir, "there is a checkpoint")
            second.stop(signal.SIGKILL)
            box.until(lambda: "1 of 2 trainer machines" in str(box.get(f"/v1/jobs/{job_id}")), "the job names its wait")
            join("b")
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        assert "job_resumed" in {event["kind"] for event in box.events(job_id)}
        assert "machine_lost" in (box.state / "logs" / "trainer.log").read_text()
