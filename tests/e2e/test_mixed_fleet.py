"""vLLM workers under one job, alone and beside torch workers: whoever dies, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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


def test_a_job_on_vllm_and_torch_workers_survives_the_death_of_one(tmp_path: Path) -> None:
    vllm_engines.require_installed()
    spec = small_job(steps=16)
    with black_box(tmp_path / "state", workers=1, reserved=0, engine="vllm") as box, ExitStack() as joined:
        job_id = box.submit(spec)
        # The torch worker, which is ready much earlier, could end the job before vLLM has started.
        box.command_job(job_id, "pause")
        with closing(Observer(box.redis_url, job_id)) as observer:
            joined.enter_context(torch_worker(box, tmp_path / "joined.log"))
            box.until(lambda: ready(box, "by-hand"), "the torch worker is ready")
            box.until(lambda: ready(box, "worker-1"), "the vllm worker is ready", within_s=400)
            (worker,) = box.processes("preemptible")
            children = [Path("/proc", str(child)) for child in children_of(worker["pid"])]
            cores = [child for child in children if b"resource_tracker" not in (child / "cmdline").read_bytes()]
            assert cores
            assert not any(box.token.encode() in (core / "environ").read_bytes() for core in cores)
            box.command_job(job_id, "resume")
            box.until(lambda: "worker-1" in makers(observer), "the vllm worker has sent tokens")
            box.until(lambda: running(box, "worker-1"), "the vllm worker has samples")
            box.kill("preemptible")
            box.until(lambda: not any(map(lives, cores)), "its engine core ended with it")
            box.kill("preemptible", signal.SIGTERM)  # its successor would only load vLLM once more
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
        assert audit["preemptions"]["without_notice"] >= 1
        assert makers(observer) >= {"worker-1", "by-hand"}


def test_a_job_on_vllm_workers_alone_survives_the_death_of_one(tmp_path: Path) -> None:
    vllm_engines.require_installed()
    spec = small_job(steps=4)
    with black_box(tmp_path / "state", workers=2, reserved=0, engine="vllm") as box:
        box.until(lambda: len(box.get("/v1/workers")) == 2, "both have joined")
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until(lambda: ready(box, "worker-1") and ready(box, "worker-2"), "both are ready")
            victim = box.processes("preemptible")[0]
            box.until(lambda: running(box, victim["name"]), "it has samples")
            os.kill(victim["pid"], signal.SIGKILL)
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
        assert audit["preemptions"] == {"without_notice": 1}
        assert not [event for event in box.events(job_id) if event["kind"] == "parity_check_failed"]
