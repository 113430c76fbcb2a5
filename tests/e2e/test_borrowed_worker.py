"""Workers on serving GPUs: they yield and return in the middle of a job, which loses and repeats nothing."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import vllm_engines
from tests.support.black_box import ROOT, BlackBox, Observer, black_box, start_forked
from tests.support.ports import reserve_port
from tests.support.serving_engine import serving_engine
from tests.support.small_job import check, small_job

BURSTS = 3
NAME = "borrowed"
MODEL = ROOT / "examples" / "countdown" / "base"


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


# --- one engine that serves and generates -----------------------------------------------------------------------------

PROMPTS = ["3 4 5", "12 7 99", "1 2 3 4", "50 8"]


class Served:
    """A worker whose vLLM also serves the example's model."""

    def __init__(self, box: BlackBox, folder: Path) -> None:
        vllm_engines.copy_renderable(MODEL, folder / "model")
        self.log = folder / "serving.log"
        port = reserve_port(self)
        key = {"Authorization": "Bearer key-of-clients"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=key, trust_env=False, timeout=120)
        where = ("--url", box.url, "--token", box.token)
        serve = ("--engine", "vllm", "--device", "cpu", "--serve", f"127.0.0.1:{port}")
        self.process = start_forked("worker", "join", *where, "--name", NAME, *serve, log=self.log)

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.http.get("/health").is_success
        except httpx.TransportError:
            return False

    def answers(self) -> list[object]:
        """Return the greedy answers to all prompts, asked at the same time."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self._answer, PROMPTS))

    def _answer(self, prompt: str) -> object:
        greedy = {"model": "prod", "max_tokens": 60, "temperature": 0}
        body = {**greedy, "prompt": prompt, "logprobs": 1}
        completion = self.http.post("/v1/completions", json=body).raise_for_status().json()
        body = {**greedy, "messages": [{"role": "user", "content": prompt}]}
        chat = self.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        text = completion["choices"][0]
        return text["text"], text["logprobs"]["tokens"], chat["choices"][0]["message"]["content"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_base_that_is_served_never_changes_while_its_adapter_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts of requests take seats back; nothing is lost; a job that trains all weights is refused by name."""
    vllm_engines.require_installed("watchfiles")
    monkeypatch.setenv("RLBOOST_WORKER_SLOTS", "24")
    monkeypatch.setenv("RLBOOST_WORKER_LEASE_S", "30")
    spec = small_job(steps=8, elastic={"weights": "lora"})
    spec["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    with black_box(tmp_path / "state", workers=1, reserved=0) as box:
        monkeypatch.setenv("RLBOOST_WORKER_BASE_MODEL", str(tmp_path / "model"))
        monkeypatch.setenv("RLBOOST_WORKER_KV_CACHE_BYTES", str(64 << 20))
        monkeypatch.setenv("RLBOOST_WORKER_SERVE_ARGS", '{"served_model_name": "prod"}')
        monkeypatch.setenv("VLLM_API_KEY", "key-of-clients")
        monkeypatch.setenv("RLBOOST_WORKER_SERVE_TTFT_MS", "1")  # any request is late: it takes seats back
        served = Served(box, tmp_path)
        try:
            box.until(served.is_healthy, "the model is served", within_s=600)
            before = served.answers()
            with box.begun_on_spot(spec, n_workers=2) as (job_id, observer):
                while box.get(f"/v1/jobs/{job_id}")["state"] not in {"completed", "failed"}:
                    box.until(
                        lambda: worker(box)["running"] not in {0, 1} or done(box, job_id),
                        "it has samples",
                        within_s=300,
                    )
                    assert served.answers() == before
                audit = check(box, job_id, observer, spec)
            assert (audit["preemptions"], audit["tokens_regenerated"]) == ({}, {})
            spans = [span for bodies in observer.finished.values() for span in bodies[0]["spans"]]
            versions = {version for name, version, _ in spans if name.startswith(NAME)}
            assert len(versions) > 1
            assert "seats_reduced" in served.log.read_text()
            assert refusals(box, job_id) == []
            with box.begun_on_spot(small_job(steps=4), n_workers=2) as (whole, _):
                box.until_completed(whole)
            assert refusals(box, whole)
            assert all("it loads adapters only: train an adapter (lora" in reason for reason in refusals(box, whole))
            assert served.answers() == before
            check_front(served.http)
            box.down()
            assert served.answers() == before
            monkeypatch.delenv("RLBOOST_WORKER_SERVE_ARGS")  # the system's own worker serves nothing
            box.up()
            box.until(lambda: worker(box)["state"] in {"joining", "ready"}, "the system has it again", within_s=300)
            box.command("worker", "drain", str(worker(box)["id"]))
            box.until(lambda: "rollouts_ended" in served.log.read_text(), "it is drained")
            assert served.answers() == before
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 0, served.log.read_text()
        finally:
            served.http.close()
            served.process.kill()
            served.process.wait()


def done(box: BlackBox, job_id: str) -> bool:
    return bool(box.get(f"/v1/jobs/{job_id}")["state"] in {"completed", "failed"})


def refusals(box: BlackBox, job_id: str) -> list[str]:
    return [one["fields"]["reason"] for one in box.events(job_id) if one["kind"] == "weights_refused"]


def check_front(http: httpx.Client) -> None:
    """Assert that clients of the server reach its model, and nothing else of the worker or of vLLM."""
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["prod"]
    for path in ("metrics", "docs", "openapi.json", "sleep", "collective_rpc", "update_weights", "pause", "v1/notice"):
        assert http.get(f"/{path}").status_code == http.post(f"/{path}", json={}).status_code == 404
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        assert http.post(f"/v1/{path}", json={"lora_name": "a", "lora_path": "/tmp"}).status_code == 404
    assert http.post("/v1/completions", json={"model": "job", "prompt": "3"}).status_code == 404
    assert http.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 401
    body = {"model": "prod", "prompt": "3 4", "n": 3, "seed": 1, "temperature": 1, "max_tokens": 20}
    choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    answer = http.post("/v1/completions", json={"model": "prod", "prompt": "3", "priority": -1})
    assert (answer.status_code, "priority" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--engine", "torch"), "the torch engine serves no requests"),
        (("--engine", "vllm", "--role", "reserved"), "use role preemptible"),
        (("--engine", "vllm", "--beside", "http://127.0.0.1:1"), "give serve, or beside_url"),
        (("--engine", "vllm"), "set base_model"),
    ],
)
def test_worker_that_cannot_serve_says_why(given: tuple[str, ...], why: str, tmp_path: Path) -> None:
    log = tmp_path / "refused.log"
    where = ("--url", "http://127.0.0.1:1", "--token", "token-of-a-test", "--serve", "127.0.0.1:1")
    assert start_forked("worker", "join", *where, *given, log=log).wait(60) == 2
    assert why in log.read_text()


def test_worker_whose_address_is_taken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_WORKER_BASE_MODEL", str(MODEL))
    where = ("--url", "http://127.0.0.1:1", "--token", "token-of-a-test", "--engine", "vllm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address, log = f"127.0.0.1:{taken.getsockname()[1]}", tmp_path / "refused.log"
        assert start_forked("worker", "join", *where, "--serve", address, log=log).wait(60) == 2
    assert f"cannot listen on {address}" in log.read_text()
    assert "RLBOOST_WORKER_SERVE or --serve" in log.read_text()
