"""vLLM and torch workers under one job: whichever dies or leaves, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support import vllm_engines
from tests.support.black_box import BlackBox, Observer, black_box, start_forked
from tests.support.ranks import children_of
from tests.support.small_job import check, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def ready(box: BlackBox, name: str) -> bool:
    return any(w["id"].startswith(name) and w["state"] == "ready" for w in box.get("/v1/workers"))


def running(box: BlackBox, name: str) -> bool:
    return any(w["id"].startswith(name) and w["running"] for w in box.get("/v1/workers"))


def makers(observer: Observer) -> set[str]:
    return {worker.rpartition("-")[0] for _, worker in list(observer.flushed)}


def lives(process: Path) -> bool:
    try:
        return ") Z " not in (process / "stat").read_text()
    except OSError:
        return False


@contextmanager
def torch_worker(box: BlackBox, log: Path) -> Iterator[None]:
    process = start_forked("worker", "join", "--url", box.url, "--token", box.token, "--name", "by-hand", log=log)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_job_on_vllm_and_torch_workers_survives_the_loss_of_one_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of the killed vLLM worker resume on either engine; those of the torch worker, on the other vLLM one."""
    vllm_engines.require_installed()
    monkeypatch.setenv("RLBOOST_WORKER_SLOTS", "24")  # a step of 64 samples needs all three workers
    spec = small_job(steps=16)
    with black_box(tmp_path / "state", workers=2, reserved=0, engine="vllm") as box, ExitStack() as joined:
        job_id = box.submit(spec)
        # The torch worker, which is ready much earlier, could end the job before vLLM has started.
        box.command_job(job_id, "pause")
        with closing(Observer(box.redis_url, job_id)) as observer:
            joined.enter_context(torch_worker(box, tmp_path / "joined.log"))
            for name in ("by-hand", "worker-1", "worker-2"):
                box.until(partial(ready, box, name), f"{name} is ready", within_s=400)
            victim = box.processes("preemptible")[0]
            cores = engine_cores(victim["pid"])
            assert cores
            assert not any(box.token.encode() in (core / "environ").read_bytes() for core in cores)
            box.command_job(job_id, "resume")
            box.until(lambda: makers(observer) >= {"by-hand", "worker-1", "worker-2"}, "each worker has sent tokens")
            box.until(lambda: running(box, victim["name"]), "the vLLM worker has samples")
            os.kill(victim["pid"], signal.SIGKILL)
            box.until(lambda: not any(map(lives, cores)), "its engine core ended with it")
            box.until(lambda: running(box, "by-hand"), "the torch worker has samples")
            joined.close()
            assert box.get(f"/v1/jobs/{job_id}")["state"] == "running"
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
        assert audit["preemptions"]["without_notice"] == 1
        assert not [event for event in box.events(job_id) if event["kind"] == "parity_check_failed"]


def engine_cores(worker_pid: int) -> list[Path]:
    """Return the folders in /proc of a vLLM worker's processes that compute."""
    children = [Path("/proc", str(child)) for child in children_of(worker_pid)]
    return [child for child in children if b"resource_tracker" not in (child / "cmdline").read_bytes()]
