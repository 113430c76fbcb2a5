"""A real manager, Redis and weight store, real workers, and a job whose versions come from the trainer's own code.

Only the trainer's loop is played: it asks for samples. Imports torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.weights import StorePublisher
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts
from rlboost.services.trainer.job.job import DeviceThread
from rlboost.services.trainer.job.publishing import VersionPublisher
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import Event, GroupRequested, JobReport, SampleDropped, SampleFinished, Sampling
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.wire import I32, pack
from tests.support import published_model, tiny_models
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.trainer_rig import Rig

SPEC = {
    "name": "tiny",
    "data": {"train": "t.jsonl"},
    "reward": {"function": "a:b"},
    "steps": 9,
    "sampling": {"max_tokens": 4000},
}


S = TypeVar("S", SampleFinished, SampleDropped)


class RealFleet:
    """What a worker joins, with one job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.redis = RedisServer(directory / "redis", aof=True)
        self.redis.start()
        self.store = self.service("weight_store", "WEIGHT_STORE", directory, DIR=str(directory / "weights"))
        self.manager = self.service("rollout_manager", "MANAGER", directory, WEIGHT_STORE_URL=self.store.url)
        self.http = httpx.Client(base_url=self.manager.url, headers={"Authorization": f"Bearer {TOKEN}"})
        self.workers: dict[str, ServiceProcess] = {}
        self.job = ""
        self._groups = 0

    def service(self, name: str, prefix: str, folder: Path, module: str = "", **settings: str) -> ServiceProcess:
        prefix = f"RLBOOST_{prefix}_"
        env = {f"{prefix}{key}": value for key, value in settings.items()}
        return ServiceProcess(name, prefix, folder, self.redis.url, env, module)

    def start(self) -> None:
        """Start all but workers, and publish version 0 of a job that runs."""
        self.store.start()
        self.manager.start()
        model = self.directory / "model"
        tiny_models.make(published_model.config(2)).save_pretrained(model)
        self.job = self.http.post("/v1/jobs", json=SPEC | {"model": str(model)}).json()["id"]
        asyncio.run(self._begin(model))

    async def _begin(self, model: Path) -> None:
        bus, device, waits = RedisBus(self.redis.url), DeviceThread(), Waits()
        spec = parse(SPEC | {"model": str(model)})
        engine = TorchPolicy(PolicySettings(optimizer=spec.optimizer), device="cpu")
        client = StoreClient(self.store.url, TOKEN)
        config_json = (model / "config.json").read_text()
        weights = StorePublisher(client, self.job, config_json, self.directory / "pulled", waits, 30.0)
        asked = build_canary_prompts(tiny_models.VOCABULARY, temperature=1.0, dtype="float32")
        rig = Rig(self.directory, spec)
        job = rig.claimed(device)
        job.resources = replace(job.resources, engine=engine, weights=weights, canary_prompts=asked)
        try:
            engine.load_hf(model)
            versions = VersionPublisher(job)
            await versions.refresh_head()
            await versions.ensure_published(0)
            await bus.append(names.JOB_REPORTS, JobReport(job_id=self.job, state="running", step=0))
        finally:
            await weights.close()
            device.close()
            await bus.close()

    @contextmanager
    def without_manager(self) -> Iterator[None]:
        """Be without a manager for a while."""
        self.manager.kill()
        try:
            yield
        finally:
            self.manager.start()

    def hire(self, name: str, module: str = "", **settings: str) -> ServiceProcess:
        """Start a worker, or what `module` makes of one."""
        folder = self.directory / name
        folder.mkdir()
        known = {"URL": self.manager.url, "NAME": name, "SLOTS": "8", "CACHE_DIR": str(folder / "cache")}
        worker = self.service("rollout_worker", "WORKER", folder, module, **(known | settings))
        worker.launch()
        self.workers[name] = worker
        return worker

    async def request(self, *, n: int, max_tokens: int, prompt: Sequence[int] = (1, 2, 3)) -> range:
        """Ask for a group of samples; return their ids."""
        group = SampleId(1, False, 0, self._groups, 0).pack()
        self._groups += 1
        request = GroupRequested(
            job_id=self.job,
            group=group,
            n=n,
            prompt=pack(prompt, I32),
            sampling=Sampling(max_tokens=max_tokens),
            version=0,
            seed=group,
        )
        async with self._bus() as bus:
            await bus.append(names.rollouts_requested(self.job), request)
        return range(group, group + n)

    async def delivered(self, group: range, kind: type[S] = SampleFinished) -> list[S]:  # type: ignore[assignment]  # its default
        """Return what became of a group's samples once all are there, each once, and all of this kind."""
        async with self._bus() as bus:

            async def samples() -> list[S]:
                read = await bus.read({names.rollouts_finished(self.job): START}, count=10_000)
                found = [entry.message for entry in read if isinstance(entry.message, kind)]
                found = [sample for sample in found if sample.sample in group]
                assert len(found) >= len(group), f"{len(found)} of {len(group)} samples"
                return found

            found = await eventually(samples)
        assert sorted(sample.sample for sample in found) == list(group)
        return found

    @asynccontextmanager
    async def _bus(self) -> AsyncIterator[RedisBus]:
        bus = RedisBus(self.redis.url)
        try:
            yield bus
        finally:
            await bus.close()

    def worker(self, name: str) -> Mapping[str, Any]:
        """Return what the manager says of a worker's newest incarnation; empty if it knows none."""
        found = [w for w in self.http.get("/v1/workers").json() if w["id"].startswith(f"{name}-")]
        return found[-1] if found else {}

    async def until(self, name: str, state: str, *, busy: bool = False, within_s: float = 60.0) -> Mapping[str, Any]:
        """Wait until the manager sees a worker in this state, and making tokens if it is to be busy."""

        def there() -> Mapping[str, Any]:
            seen = self.worker(name)
            assert seen.get("state") == state, f"{name}: {seen}"
            assert not busy or seen["tokens_per_s"], f"{name} is idle"
            return seen

        return await eventually(there, within_s=within_s)

    async def events(self, kind: str) -> list[dict[str, Any]]:
        """Return what has happened in the job."""
        async with self._bus() as bus:
            entries = await bus.read({names.job_events(self.job): START, names.FLEET_EVENTS: START}, count=10_000)
        events = [entry.message for entry in entries]
        return [event.fields for event in events if isinstance(event, Event) and event.kind == kind]

    def close(self) -> None:
        """Kill everything."""
        self.http.close()
        for service in (*self.workers.values(), self.manager, self.store):
            service.kill()
        self.redis.stop()


def lines(worker: ServiceProcess, event: str) -> list[dict[str, Any]]:
    """Return a worker's log lines of one kind."""
    log = [json.loads(line) for line in worker.log().splitlines() if line.startswith("{")]
    return [line for line in log if line["event"] == event]
