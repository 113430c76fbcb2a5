"""A worker beside a serving engine: it yields and returns in the middle of a job, which loses and repeats nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.black_box import BlackBox, Observer, black_box, start_forked
from tests.support.serving_engine import serving_engine
from tests.support.small_job import check, small_job

BURSTS = 3
NAME = "borrowed"


def worker(box: BlackBox) -> dict[str, object]:
    found = [each for each in box.get("/v1/workers") if each["id"].startswith(NAME)]
    return found[0] if found else {"state": "", "running": 0}


@contextmanager
def borrowed(box: BlackBox, serving_url: str, log: Path) -> Iterator[None]:
    where = ("--url", box.url, "--token", box.token)
    process = start_forked("worker", "join", *where, "--name", NAME, "--beside", serving_url, log=log)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bursts_of_a_serving_engine_cost_no_token_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_WORKER_SLOTS", "32")
    monkeypatch.setenv("RLBOOST_WORKER_LEASE_S", "30")  # no worker is lost on a busy machine, so no token is repeated
    spec, log = small_job(steps=24), tmp_path / "borrowed.log"
    with serving_engine() as (engine, url), black_box(tmp_path / "state", workers=1, reserved=0) as box:
        engine.set(running=1)
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer, borrowed(box, url, log):
            box.until(lambda: worker(box)["state"] == "suspended", "the worker begins yielding")
            for _ in range(BURSTS):
                engine.set(running=0)
                box.until(lambda: bool(worker(box)["running"]), "the worker has samples")
                engine.set(running=2, waiting=1)
                box.until(lambda: worker(box)["state"] == "suspended" and not worker(box)["running"], "it has yielded")
            engine.set(running=0)
            box.until_completed(job_id)
            audit = check(box, job_id, observer, spec)
        assert (audit["preemptions"], audit["tokens_regenerated"]) == ({}, {})
        assert audit["migrations"]
        assert any(name.startswith(NAME) for _, name in observer.flushed)
        assert log.read_text().count("device_yielded") >= BURSTS


def test_worker_beside_a_server_without_metrics_does_not_join(tmp_path: Path) -> None:
    log = tmp_path / "refused.log"
    with serving_engine() as (engine, url):
        engine.status = 404
        where = ("--url", "http://127.0.0.1:1", "--token", "token-of-a-test")
        process = start_forked("worker", "join", *where, "--beside", url, log=log)
        assert process.wait(60) == 2
    assert f"RLBOOST_WORKER_BESIDE_URL: {url}/metrics answers with status 404" in log.read_text()
