"""A job whose trainer and workers are played by a test, for real managers on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import httpx

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested, JobReport, Message, SampleFinished, Sampling, WeightsCommitted
from rlboost.shared.messages.codec import Role
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, ints, pack
from tests.support.eventually import eventually
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all

SPEC = {"name": "t", "model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "a:b"}, "steps": 9}
_HEARTBEAT_S = 0.3


class PlayedJob:
    """One job, what its trainer says, and workers that live in tasks of this process."""

    def __init__(self, bus: RedisBus, *, forgives_outages: bool = False, number: int = 1) -> None:
        """Play the job that is created as the `number`th of its Redis.

        Args:
            bus: an open one.
            forgives_outages: a worker continues when Redis is back; else its task fails.
            number: from 1.

        """
        self.bus = bus
        self.id = ""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._forgives: tuple[type[Exception], ...] = ()
        if forgives_outages:
            self.forgives_outages()
        self._number = number
        self._next_group = 0

    def forgives_outages(self) -> None:
        """Let workers continue when Redis is back."""
        self._forgives = (BusUnavailable,)

    async def create(self, http: httpx.AsyncClient, url: str, **spec: Any) -> None:
        """Create the job, let it run, and commit version 0."""
        answer = await http.post(f"{url}/v1/jobs", json=SPEC | spec)
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]
        await self.bus.append(names.JOB_REPORTS, JobReport(job_id=self.id, state="running", step=0))
        await self.commit(0)

    async def commit(self, version: int) -> None:
        message = WeightsCommitted(job_id=self.id, version=version, manifest_digest="", n_bytes=0, at=0.0)
        await self.bus.append(names.WEIGHTS_COMMITTED, message)

    async def request(self, *, step: int = 0, groups: int = 4, n: int = 8, max_tokens: int = 40) -> None:
        for _ in range(groups):
            request = GroupRequested(
                job_id=self.id,
                group=SampleId(self._number, False, step, self._next_group, 0).pack(),
                n=n,
                prompt=pack([1, 2, 3], I32),
                sampling=Sampling(max_tokens=max_tokens),
                version=step,
                seed=1,
            )
            await self.bus.append(names.rollouts_requested(self.id), request)
            self._next_group += 1

    def start_worker(self, name: str, role: Role = "preemptible", *, slots: int = 8, pace_s: float = 0.02) -> SimWorker:
        worker = SimWorker(self.bus, name, role, slots=slots)
        self.run_worker(worker, pace_s)
        return worker

    def run_worker(self, worker: SimWorker, pace_s: float = 0.02) -> None:
        """Let a worker join and work."""
        self.tasks[worker.id] = asyncio.create_task(self._live(worker, pace_s), name=worker.id)

    async def _live(self, worker: SimWorker, pace_s: float) -> None:
        joined, last_heartbeat = False, 0.0
        while worker.id in self.tasks and not worker.dismissed:
            with contextlib.suppress(*self._forgives):
                if not joined:
                    await worker.join()
                    joined = True
                if time.monotonic() - last_heartbeat > _HEARTBEAT_S:
                    await worker.send_heartbeat()
                    last_heartbeat = time.monotonic()
                await worker.execute_commands()
                worker.generate(1)
                await worker.flush()
            await asyncio.sleep(pace_s)

    def kill_worker(self, name: str) -> None:
        """Stop a worker at once: it sends nothing more."""
        del self.tasks[name]

    async def stop_workers(self) -> None:
        """Stop all workers at once; none sends `WorkerLeft`."""
        tasks = list(self.tasks.values())
        self.tasks.clear()
        await asyncio.gather(*tasks)

    async def finished(self) -> list[Message]:
        return [entry.message for entry in await read_all(self.bus, names.rollouts_finished(self.id))]

    async def delivered(self, n: int) -> list[SampleFinished]:
        """Return so many samples once all have come, each once and whole."""

        async def samples() -> list[SampleFinished]:
            found: list[SampleFinished] = []
            with contextlib.suppress(*self._forgives):
                found = [m for m in await self.finished() if isinstance(m, SampleFinished)]
            assert len(found) >= n, f"{len(found)} of {n} samples"
            return found

        found = await eventually(samples)
        assert len({m.sample for m in found}) == len(found) == n
        for sample in found:
            check_completion(ints(sample.tokens, I32), sample.spans)
        return found
