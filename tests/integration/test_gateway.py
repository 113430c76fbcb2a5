"""The fleet as one vLLM server: real manager, store and workers behind a gateway."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI
from safetensors.torch import save_file

from rlboost.fleet import AsyncFleet
from rlboost.gateway import Gateway, create_app
from tests.support import tiny_models
from tests.support.ports import reserved_port
from tests.support.published_model import policy as model
from tests.support.service_process import TOKEN
from tests.support.serving_system import TEMPLATE, WAIT_S, System, until

KEY = "a key"
PROMPT = [5, 7, 9, 11]


class Served:
    """A gateway in a thread, and a client of it."""

    def __init__(self, system: System, port: int, job: str, api_key: str = "") -> None:
        fleet = AsyncFleet(system.manager.url, TOKEN, job=job, model=str(system.model), retry_for_s=WAIT_S)
        app = create_app(Gateway(fleet, system.manager.url, TOKEN, str(system.model), WAIT_S), api_key)
        self.system, self.url = system, f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()

    def generate(self, n: int, **more: Any) -> httpx.Response:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": n, "logprobs": 0}, "cache_salt": "1"}
        return self.http.post("/inference/v1/generate", json=body | more)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("gateway"), TEMPLATE)
    save_file(dict(model(0).named_parameters()), system.model / "model.safetensors")
    try:
        system.manager.start()
        for name in ("w1", "w2"):
            system.hire(name)
        system.store.start()
        yield system
    finally:
        system.close()


@pytest.fixture(scope="module")
def served(system: System) -> Iterator[Served]:
    with reserved_port() as port:
        served = Served(system, port, "served")
        try:
            until(lambda: served.generate(1).status_code == 200)
            yield served
        finally:
            served.close()


def folder_of(tmp_path: Path, seed: int) -> Path:
    save_file(dict(model(seed).named_parameters()), tmp_path / "model.safetensors")
    return tmp_path


def test_generated_tokens_have_the_logprobs_of_the_weights_that_were_sent(served: Served, tmp_path: Path) -> None:
    for seed in (1, 2):
        for path, body in (
            ("/pause?mode=keep", None),
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": {"path": str(folder_of(tmp_path, seed))}}),
            ("/finish_weight_update", {"weight_version": f"step-{seed}"}),
            ("/resume", None),
        ):
            assert served.http.post(path, json=body).status_code == 200
        assert served.http.get("/weight_info").json() == {"weight_version": f"step-{seed}"}
        until(lambda seed=seed: matches(served, seed))
    shutil.rmtree(tmp_path)


def matches(served: Served, seed: int) -> bool:
    """Return True if a completion is of this policy: the workers switch one by one."""
    (choice,) = served.generate(8).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    expected = tiny_models.logprobs(model(seed), PROMPT, choice["token_ids"])
    return [one["logprob"] for one in content] == pytest.approx(expected, abs=1e-4)


def test_client_of_openai_completes_and_streams(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        (one,) = client.models.list().data
        assert one.id == str(served.system.model)
        made: Any = client.completions.create(model=one.id, prompt=PROMPT, max_tokens=6, seed=(1 << 63) - 1, logprobs=0)
        assert len(made.choices[0].logprobs.token_logprobs) == made.usage.completion_tokens
        blocks = list(client.completions.create(model=one.id, prompt=PROMPT, max_tokens=6, stream=True))
        assert blocks[-1].choices[0].finish_reason in {"stop", "length"}


def test_requests_survive_the_death_of_manager_and_worker(served: Served) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = [pool.submit(served.generate, 400, request_id=f"r{i}") for i in range(16)]
        time.sleep(0.5)
        served.system.kill_the_worker_that_runs()
        served.system.manager.kill()
        served.system.manager.start()
        served.system.hire("w3")
        for i, one in enumerate(made):
            assert one.result().status_code == 200
            assert one.result().json()["request_id"] == f"r{i}"


def test_pause_holds_new_requests_and_wait_ends_those_in_flight(served: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(served.generate, 300)
        time.sleep(0.2)
        assert served.http.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
        assert running.done()
        assert served.http.get("/is_paused").json() == {"is_paused": True}
        held = pool.submit(served.generate, 1)
        time.sleep(0.3)
        assert not held.done()
        served.http.post("/resume")
        assert held.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/pause?mode=abort", {}, 400, "throws samples away"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "10.0.0.1"}}, 501, "none is a rank"),
        ("/update_weights", {"update_info": {"names": ["w"]}}, 501, "send its path"),
        ("/update_weights", {"weight_dir": "/nowhere"}, 400, "/nowhere: this machine reads no"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 501, "send merged weights"),
        ("/v1/completions", {"model": "other", "prompt": PROMPT}, 404, "'other' does not exist"),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "stream": True}, 400, "stream"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": 2}}, 400, "logprobs"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"a": 1}}, 400, "text only"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = served.http.post(path, json=body)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


def test_web_pages_are_no_clients(served: Served) -> None:
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    answer = served.http.post("/update_weights", content=b'{"weight_dir": "/"}', headers=headers)
    assert answer.status_code == 403


def test_bodies_that_are_no_objects_are_refused(served: Served) -> None:
    for content in (b"{", b"[1]"):
        assert served.http.post("/v1/completions", content=content).status_code == 400


def test_key_is_taken_as_bearer_token_and_from_the_url(system: System) -> None:
    with reserved_port() as port:
        guarded = Served(system, port, "guarded", KEY)
        try:
            assert guarded.http.get("/health").status_code == 200
            assert guarded.http.get("/v1/models").status_code == 401
            assert guarded.http.get("/v1/models", auth=("any", KEY)).status_code == 200
            assert guarded.http.get("/v1/models", auth=("any", "other")).status_code == 401
            assert guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        finally:
            guarded.close()
