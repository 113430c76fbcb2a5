"""A leading manager and its REST API for unit tests, without sockets."""

from __future__ import annotations

import httpx

from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.messages import JobReport, JobState
from rlboost.shared.streams import names
from tests.support.jobs import job_file
from tests.support.memory_bus import MemoryBus


class ManagerRig:
    """A leading manager on a bus in memory, an admin's client of its REST API, and one job."""

    def __init__(self, *, redis_limit_s: float = 1.0) -> None:
        self.bus = MemoryBus()
        self.manager = Manager(self.bus, lease_s=1.0, redis_limit_s=redis_limit_s)
        transport = httpx.ASGITransport(build(self.manager, self.bus, Settings(token="t")))
        headers = {"Authorization": "Bearer t"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://manager/v1", headers=headers)
        self.job = ""

    async def start(self) -> None:
        """Lead, and create the job."""
        assert await self.manager.try_lead()
        self.job = (await self.http.post("/jobs", json=job_file())).json()["id"]

    async def report(self, state: JobState) -> None:
        """Report the job's state as its trainer does."""
        await self.bus.append(names.JOB_REPORTS, JobReport(job_id=self.job, state=state, step=0))
        await self.manager.turn()
