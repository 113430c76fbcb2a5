"""A trainer as a process with what it needs around it, for tests: the machine, and what one test does on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.http.access import signed
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import parse, to_json
from rlboost.shared.messages import Event, JobCommand, JobReport, StepReport
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Delete
from rlboost.shared.weights.client import StoreClient
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.scripted_manager import ScriptedManager
from tests.support.service_process import TOKEN, ServiceProcess

STEPS = 5
"""Of a job, unless its test says otherwise."""


class Machine:
    """The processes of one machine: Redis, a weight store, a trainer."""

    def __init__(self, folder: Path, *, aof: bool = False) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis", aof=aof)
        store_dir = {"RLBOOST_WEIGHT_STORE_DIR": str(folder / "store"), "RLBOOST_WEIGHT_STORE_KEEP_VERSIONS": "9"}
        self.store = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", folder, self.redis.url, store_dir)
        env = {
            "RLBOOST_TRAINER_WEIGHT_STORE_URL": self.store.url,
            "RLBOOST_TRAINER_DIR": str(folder / "runs"),
            "RLBOOST_TRAINER_OUTAGE_LIMIT_S": "60",
            "RLBOOST_TRAINER_NAME": "the-trainer",
        }
        self.trainer = ServiceProcess("trainer", "RLBOOST_TRAINER_", folder, self.redis.url, env)

    @contextmanager
    def running(self) -> Iterator[Machine]:
        self.redis.start()
        try:
            self.store.start()
            self.trainer.start()
            yield self
        finally:
            self.trainer.kill()
            self.store.kill()
            self.redis.stop()


class Site:
    """What one test does on a machine; a scripted manager plays the other side."""

    def __init__(self, machine: Machine, files: Path) -> None:
        self.folder, self.store, self.trainer = machine.folder, machine.store, machine.trainer
        self.files = files
        self.bus = RedisBus(machine.redis.url, "test")
        self.jobs: list[str] = []

    async def create(self, job_id: str, **changes: Any) -> None:
        """Ask for a job. All have the number 1, so that the same samples are asked for in each."""
        raw: dict[str, Any] = {
            "model": str(self.files / "model"),
            "data": {
                "train": str(self.files / "train.jsonl"),
                "eval": str(self.files / "eval.jsonl"),
                "prompts_per_step": 4,
            },
            "reward": {"function": "tests.support.reward_functions:lengths"},
            "algorithm": {"group_size": 3, "updates_per_step": 2},
            "sampling": {"max_tokens": 24},
            "optimizer": {"lr": 1e-3, "warmup_steps": 2, "decay": 0.5, "weight_decay": 0.01},
            "trainer": {"checkpoint_every": 2, "micro_batch_tokens": 128},
            "eval": {"every": 2, "samples": 5},
            "steps": STEPS,
        }
        await self.submit(job_id, {**raw, **changes})

    async def submit(self, job_id: str, raw: dict[str, Any]) -> None:
        """Ask for a job that is given whole."""
        self.jobs.append(job_id)
        spec_json = to_json(parse(raw))
        command = JobCommand(
            command_id=f"create-{job_id}", action="create", job_id=job_id, job_no=1, spec_json=spec_json
        )
        await self.bus.append(names.JOB_COMMANDS, signed(command, TOKEN))

    async def command(self, job_id: str, action: Any) -> None:
        command = JobCommand(command_id=f"{action}-{job_id}", action=action, job_id=job_id, job_no=1)
        await self.bus.append(names.JOB_CONTROLS, signed(command, TOKEN))

    @asynccontextmanager
    async def manager(self, job_id: str) -> AsyncIterator[ScriptedManager]:
        manager = ScriptedManager(self.bus, job_id)
        task = asyncio.create_task(manager.run(), name="scripted-manager")
        try:
            yield manager
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def reports(self, job_id: str) -> list[JobReport | StepReport]:
        entries = await self.bus.read({names.JOB_REPORTS: START}, count=10_000)
        messages = [entry.message for entry in entries]
        return [m for m in messages if isinstance(m, JobReport | StepReport) and m.job_id == job_id]

    async def ended(self, job_id: str, within_s: float = 120.0) -> JobReport:
        await eventually(lambda: self.has_ended(job_id), within_s=within_s)
        return [report for report in await self.reports(job_id) if isinstance(report, JobReport)][-1]

    async def head(self, job_id: str) -> int:
        async with StoreClient(self.store.url, TOKEN) as client:
            info = await client.head(job_id)
        return -1 if info is None else info.version

    async def lease(self, job_id: str) -> dict[str, Any]:
        [text] = await self.bus.lease_values([names.trainer_lease(job_id)])
        body: dict[str, Any] = json.loads(text) if text else {}
        return body

    async def expire_lease(self, job_id: str) -> None:
        """Do what time does to a dead trainer's lease."""
        await self.bus.transact([Delete(names.trainer_lease(job_id))])

    async def waits_in(self, job_id: str, step: int, manager: ScriptedManager) -> None:
        """Return once the trainer has taken all of a step that the manager did not withhold."""
        n_samples = 5 if step == STEPS else 4 * 3 + (5 if step % 2 == 0 else 0)

        async def it_does() -> bool:
            asked = {sample for sample in manager.answered if SampleId.unpack(sample).step == step}
            there = sum(not manager.withholds(sample) for sample in asked)
            waiting = (await self.lease(job_id)).get("waiting") or {}
            arrived = f"{there} of {n_samples} samples have arrived"
            return len(asked) == n_samples and waiting.get("because", "").startswith(arrived)  # then rate and time left

        await eventually(it_does, within_s=120)

    async def has_ended(self, job_id: str) -> bool:
        try:
            reports = [report for report in await self.reports(job_id) if isinstance(report, JobReport)]
        except BusUnavailable:
            return False
        return bool(reports) and reports[-1].state in {"completed", "failed", "cancelled"}

    def model(self, job_id: str) -> dict[str, bytes]:
        """Return the final weights, bit for bit."""
        tensors = load_file(self.folder / "runs" / job_id / "model" / "model.safetensors")
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    async def events(self, job_id: str) -> list[tuple[str, dict[str, Any]]]:
        entries = await self.bus.read({names.job_events(job_id): START}, count=10_000)
        return [(e.message.kind, e.message.fields) for e in entries if isinstance(e.message, Event)]
