"""A real manager, Redis and weight store, and real workers with the torch engine, for OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from rlboost.shared.messages import JobReport, Message
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.weights.client import StoreClient
from tests.support import published_model
from tests.support.model_folder import write_tokenizer
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess

WAIT_S = 90.0
TEMPLATE = (
    "{% for tool in tools or [] %} {{ tool | tojson }}{% endfor %}"
    "{% for m in messages %} {{ bos_token }} {{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %} "
    """<tool_call>{"name": "{{ call.function.name }}", """
    """"arguments": {{ call.function.arguments | tojson }}}</tool_call>"""
    "{% endfor %} {{ eos_token }}{% endfor %}{% if add_generation_prompt %} {{ bos_token }}{% endif %}"
)
CALLS = {
    i: json.dumps({"name": "add", "arguments": {"a": i, "b": 1}}, separators=(",", ":")).join(
        ("<tool_call>", "</tool_call>")
    )
    for i in range(10, 50)
}
ENDS = (2, *range(50, 96))


class System:
    """Everything but a trainer, which the test plays."""

    def __init__(
        self, directory: Path, template: str, *, texts: Mapping[int, str] | None = None, ends: Sequence[int] = (2,)
    ) -> None:
        """Write the model's folder.

        Args:
            directory: of all files.
            template: of chats.
            texts: of tokens, in place of `t3 t4 ...`.
            ends: the tokens that end an answer.

        """
        self.directory = directory
        self.model = write_tokenizer(directory / "model", texts=texts)
        config = published_model.config(2).to_dict() | {"eos_token_id": list(ends)}
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "chat_template.jinja").write_text(template)
        self.redis = RedisServer(directory / "redis", aof=True)
        self.redis.start()
        self.workers: dict[str, ServiceProcess] = {}
        self.store = self._service("weight_store", "WEIGHT_STORE", DIR=str(directory / "weights"))
        self.manager = self._service("rollout_manager", "MANAGER", WEIGHT_STORE_URL=self.store.url)
        self.http = httpx.Client(base_url=self.manager.url, headers={"Authorization": f"Bearer {TOKEN}"})
        self.openai = OpenAI(base_url=f"{self.manager.url}/v1", api_key=TOKEN, max_retries=0, timeout=WAIT_S)

    def _service(self, name: str, prefix: str, **settings: str) -> ServiceProcess:
        prefix = f"RLBOOST_{prefix}_"
        env = {f"{prefix}{key}": value for key, value in settings.items()}
        return ServiceProcess(name, prefix, self.directory, self.redis.url, env)

    def start_services(self, workers: Sequence[str] = ("w1", "w2")) -> None:
        """Start all processes; there is no job yet."""
        self.manager.start()
        for name in workers:
            self.hire(name)
        self.store.start()

    def start(self, **job: Any) -> None:
        """Start all processes and two jobs."""
        self.start_services()
        self.job = self.create_job("tiny", str(self.model), **job)
        self.remote = self.create_job("remote", "some/where/else")

    def hire(self, name: str, **settings: str) -> None:
        (self.directory / name).mkdir()
        settings = {"SLOTS": "8", "CACHE_DIR": str(self.directory / name / "cache"), **settings}
        self.workers[name] = self._service("rollout_worker", "WORKER", URL=self.manager.url, NAME=name, **settings)
        self.workers[name].launch()

    def create_job(self, name: str, model: str, **more: Any) -> str:
        spec = {
            "name": name,
            "model": model,
            "data": {"train": "t.jsonl"},
            "reward": {"function": "a:b"},
            "steps": 9,
            "sampling": {"max_tokens": 24},
            **more,
        }
        job: str = self.http.post("/v1/jobs", json=spec).json()["id"]
        asyncio.run(self._begin(job))
        return job

    async def _begin(self, job: str) -> None:
        async with StoreClient(self.store.url, TOKEN) as client:
            await published_model.publish(client, job, 0, seed=0)
        await self._send(names.JOB_REPORTS, JobReport(job_id=job, state="running", step=0))

    async def _send(self, stream: str, message: Message) -> None:
        bus = RedisBus(self.redis.url)
        await bus.append(stream, message)
        await bus.close()

    def send(self, stream: str, message: Message) -> None:
        asyncio.run(self._send(stream, message))

    def audit(self) -> dict[str, Any]:
        audit: dict[str, Any] = self.http.get(f"/v1/jobs/{self.job}/audit").json()
        return audit

    def kill_the_worker_that_runs(self) -> None:
        busy: list[str] = []

        def is_found() -> bool:
            workers = self.http.get("/v1/workers").json()
            busy.extend(one["id"] for one in workers if one["running"] and one["state"] == "ready")
            return bool(busy)

        until(is_found)
        name = next(name for name in self.workers if busy[0].startswith(name))
        self.workers.pop(name).kill()

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        for service in (*self.workers.values(), self.manager, self.store):
            service.kill()
        self.redis.stop()


@contextmanager
def calling_system(directory: Path, **job: Any) -> Iterator[System]:
    """A system whose model writes tool calls, with both of its jobs served; `job` has more keys of the first one."""
    system = System(directory, TEMPLATE, texts=CALLS, ends=ENDS)
    try:
        system.start(**job)
        until(lambda: len(system.openai.models.list().data) == 2)
        yield system
    finally:
        system.close()


def until(condition: Any, within_s: float = WAIT_S) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
