"""A gateway in a thread, in front of a real manager."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from safetensors.torch import save_file

from rlboost.fleet import AsyncFleet
from rlboost.gateway.gateway import Gateway
from rlboost.gateway.vllm_routes import create_app
from tests.support.ports import reserved_port
from tests.support.published_model import policy as model
from tests.support.service_process import TOKEN
from tests.support.serving_system import TEMPLATE, WAIT_S, System, until

PROMPT = [5, 7, 9, 11]


class Served:
    """A gateway in a thread, and a client of it."""

    def __init__(
        self, system: System, port: int, job: str, api_key: str = "", *, model: str = "", **options: Any
    ) -> None:
        model = model or str(system.model)
        fleet = AsyncFleet(system.manager.url, TOKEN, job=job, model=model, retry_for_s=WAIT_S)
        self.gateway = Gateway(fleet, system.manager.url, TOKEN, model, WAIT_S, **options)
        app = create_app(self.gateway, api_key)
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

    def update(self, folder: Path) -> dict[str, Any]:
        answer = self.http.post("/update_weights", json={"weight_dir": str(folder)})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def generate(self, n: int, **more: Any) -> httpx.Response:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": n, "logprobs": 0}, "cache_salt": "1"}
        return self.http.post("/inference/v1/generate", json=body | more)


@contextmanager
def started(folder: Path, **options: Any) -> Iterator[System]:
    """A system whose model folder has weights."""
    system = System(folder, TEMPLATE, **options)
    save_file(dict(model(0).named_parameters()), system.model / "model.safetensors")
    try:
        system.start_services()
        yield system
    finally:
        system.close()


@contextmanager
def serving(system: System, job: str) -> Iterator[Served]:
    """A gateway that has answered."""
    with reserved_port() as port:
        served = Served(system, port, job)
        try:
            until(lambda: served.generate(1).status_code == 200)
            yield served
        finally:
            served.close()


def folder_of(tmp_path: Path, seed: int) -> Path:
    save_file(dict(model(seed).named_parameters()), tmp_path / "model.safetensors")
    return tmp_path
