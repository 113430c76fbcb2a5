"""A manager that serves completions, with workers that a test drives."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.waiters import Waiter
from rlboost.shared.ids import SampleId, request_group
from rlboost.shared.job.spec import to_json
from rlboost.shared.messages import GroupRequested, JobCommand, JobReport, Sampling, WeightsCommitted
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, pack
from tests.support.jobs import job
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker


class Rig:
    """A manager and workers on a bus in memory, by a clock of the test's."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = Manager(
            self.bus, lease_s=2.0, redis_limit_s=9.0, clock=lambda: Now(self.clock, self.clock), leader_lease_s=1e6
        )
        self.workers: dict[str, SimWorker] = {}
        self.groups = 0

    async def start(self, *workers: str, slots: int = 4) -> None:
        assert await self.manager.try_lead()
        create = JobCommand(command_id="c", action="create", job_id="j", job_no=1, spec_json=to_json(job()))
        await self.bus.append(names.JOB_COMMANDS, create)
        await self.bus.append(names.JOB_REPORTS, JobReport(job_id="j", state="running", step=0))
        await self.commit(0)
        for name in workers:
            self.workers[name] = SimWorker(self.bus, name, slots=slots, lease_s=1e6)
            await self.workers[name].join()
        for _ in range(3):
            await self.turn()

    async def commit(self, version: int) -> None:
        message = WeightsCommitted(job_id="j", version=version, manifest_digest="", n_bytes=0, at=0.0)
        await self.bus.append(names.WEIGHTS_COMMITTED, message)

    async def turn(self) -> None:
        self.clock += 0.1
        await self.manager.turn()
        for worker in self.workers.values():
            await worker.execute_commands()
            await worker.send_heartbeat()

    async def work(self) -> None:
        for worker in self.workers.values():
            worker.generate(4)
            await worker.flush()
        await self.turn()

    async def ask(self, *, served: bool = True, **more: Any) -> GroupRequested:
        await self.send(request := self.request(served=served, **more))
        return request

    async def send(self, request: GroupRequested) -> None:
        await self.bus.append(names.rollouts_requested("j"), request)

    def request(self, *, served: bool = True, **more: Any) -> GroupRequested:
        self.groups += 1
        return GroupRequested(
            job_id="j",
            group=request_group(1, self.groups) if served else SampleId(1, False, 0, self.groups, 0).pack(),
            prompt=pack([1, 2], I32),
            version=0,
            seed=1,
            **{"n": 1, "sampling": Sampling(max_tokens=8), "expires_at": self.clock + 90.0 if served else 0.0, **more},
        )

    def register(self, request: GroupRequested) -> Waiter:
        (waiter,) = self.manager.completion_waiters.register([request], self.manager.world, resumable=False)
        return waiter

    def held(self) -> dict[str, set[int]]:
        return {name: set(worker.held) for name, worker in self.workers.items()}
