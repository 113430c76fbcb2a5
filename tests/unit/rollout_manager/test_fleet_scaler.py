"""The manager follows the number of workers worth having, with a provider whose machines a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.services.rollout_manager.__main__ import main
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.allocation import Pool
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.fleet_loops import REPEAT_S, RETRY_S, FleetScaler
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import Event, JobReport
from rlboost.shared.messages.jobs import JobState
from rlboost.shared.settings import read
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.fakes import MemoryBus
from tests.support.jobs import job_file
from tests.support.manager_fakes import FakeProvider
from tests.support.sim_worker import SimWorker

DELAY_S = 300.0
POOL = Pool(kind="sim", max_workers=4, price_per_hour=2.0)


class System:
    """A leading manager on a fake bus, one running job, and workers that appear as the provider is asked for them."""

    def __init__(self, *, pools: list[Pool], limit: float | None = None, price_file: str = "") -> None:
        self.bus, self.cloud, self.at_s = MemoryBus(), FakeProvider({POOL.kind}), 0.0
        limits: dict[str, Any] = {"max_dollars_per_hour": limit, "scale_in_delay_s": DELAY_S}
        settings = Settings(token="t", pools=pools, price_file=price_file, **limits)
        self.manager = Manager(self.bus, lease_s=1e9, redis_limit_s=1.0, prices=settings.prices)
        self.scaler = FleetScaler(self.manager, self.bus, settings, self.cloud)
        transport = httpx.ASGITransport(build(self.manager, self.bus, settings, scaler=self.scaler))
        headers = {"Authorization": "Bearer t"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://manager/v1", headers=headers)
        self.workers: list[SimWorker] = []
        self.job = ""

    async def start(self) -> None:
        assert await self.manager.try_lead()
        self.job = (await self.http.post("/jobs", json=job_file())).json()["id"]
        await self.report("running")

    async def report(self, state: JobState) -> None:
        """Have the trainer say that the job is in this state."""
        await self.bus.append(names.JOB_REPORTS, JobReport(job_id=self.job, state=state, step=0))
        await self.manager.turn()

    def want(self, workers: int | None) -> None:
        self.manager.world.jobs[self.job].record.window_tuner.target_workers = workers

    async def pass_s(self, seconds: float) -> None:
        """Let time pass; machines start and leave as commanded."""
        self.at_s += seconds
        await self.scaler.decide_once(Now(self.at_s, self.at_s))
        await self.scaler.request_once(self.at_s)
        wanted = self.cloud.requests[-1][1] if self.cloud.requests and not self.cloud.error else 0
        while len(self.present) < wanted:
            await self.join()
        await self.manager.turn()
        for worker in self.workers:
            await worker.execute_commands()
        await self.manager.turn()

    async def join(self) -> None:
        self.workers.append(SimWorker(self.bus, f"w{len(self.workers)}", lease_s=1e9))
        await self.workers[-1].join()

    @property
    def present(self) -> list[str]:
        return [worker.id for worker in self.workers if not worker.dismissed]

    async def fleet_events(self) -> list[dict[str, Any]]:
        entries = await self.bus.read({names.FLEET_EVENTS: START})
        events = [entry.message for entry in entries if isinstance(entry.message, Event)]
        return [event.fields for event in events if event.kind == "fleet_scaled"]

    async def fleet(self) -> dict[str, Any]:
        fleet: dict[str, Any] = (await self.http.get("/fleet")).json()["autoscaling"]
        return fleet


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System(pools=[POOL])
    await system.start()
    yield system
    await system.http.aclose()


async def test_fleet_follows_the_number_worth_having(system: System) -> None:
    await system.pass_s(1)
    assert system.present == ["w0"]  # not known yet
    system.want(3)
    await system.pass_s(60)
    assert system.present == ["w0", "w1", "w2"]
    system.want(1)
    for _ in range(8):
        await system.pass_s(60)
    assert len(system.present) == 1
    assert system.cloud.requests[-1] == ("sim", 1)
    (pool,) = (await system.fleet())["pools"]
    assert pool == {**POOL.model_dump(), "present": 1, "target": 1, "error": None}


async def test_workers_leave_before_the_provider_stops_any(system: System) -> None:
    await system.http.post("/fleet/scale", json={"workers": 3})
    await system.pass_s(1)
    await system.http.post("/fleet/scale", json={"workers": 1})
    await system.pass_s(1)
    assert system.cloud.requests == [("sim", 3)]  # two drain
    await system.pass_s(1)
    assert system.cloud.requests == [("sim", 3), ("sim", 1)]


async def test_surplus_workers_are_drained_in_the_managers_next_turn(system: System) -> None:
    await system.http.post("/fleet/scale", json={"workers": 3})
    await system.pass_s(1)
    await system.http.post("/fleet/scale", json={"workers": 1})
    world = system.manager.world
    await system.scaler.decide_once(Now(9.0, 9.0))
    await system.scaler.decide_once(Now(10.0, 10.0))
    assert not any(worker.state == "draining" for worker in world.fleet.workers.values())
    await system.manager.turn()
    assert [worker.state for worker in world.fleet.workers.values()].count("draining") == 2
    assert await system.fleet_events() == [{"worker_kind": "sim", "workers": 1, "before": 3}]


async def test_worker_that_joins_after_the_decision_is_kept(system: System) -> None:
    """Else the first worker of a new system would be drained by a decision of when there was no job."""
    await system.report("paused")
    await system.scaler.decide_once(Now(1.0, 1.0))
    await system.join()
    await system.manager.turn()
    await system.scaler.decide_once(Now(2.0, 2.0))
    await system.manager.turn()
    assert [worker.state for worker in system.manager.world.fleet.workers.values()] == ["joining"]
    assert await system.fleet_events() == []


async def test_provider_stops_no_machine_that_may_still_be_starting(system: System) -> None:
    await system.report("paused")
    for _ in range(3):
        await system.pass_s(DELAY_S / 3)
    assert not system.cloud.requests
    await system.pass_s(DELAY_S / 3)
    assert system.cloud.requests == [("sim", 0)]


async def test_operators_number_survives_a_new_leader_and_auto_ends_it(system: System) -> None:
    answer = await system.http.post("/fleet/scale", json={"workers": 3})
    assert answer.json() == {"workers": 3}
    assert await system.manager.try_lead()
    await system.pass_s(1)
    assert (await system.fleet())["workers"] == len(system.present) == 3
    await system.http.post("/fleet/scale", json={"workers": "auto"})
    assert (await system.fleet())["workers"] == "auto"


async def test_failed_request_is_shown_and_repeated(system: System) -> None:
    system.cloud.error = "no quota"
    for seconds in (1, RETRY_S / 2, RETRY_S):
        await system.pass_s(seconds)
    assert system.cloud.requests == [("sim", 1)] * 2
    (pool,) = (await system.fleet())["pools"]
    assert pool["error"] == "no quota"
    system.cloud.error = ""
    for seconds in (RETRY_S, RETRY_S, REPEAT_S):
        await system.pass_s(seconds)
    assert system.cloud.requests == [("sim", 1)] * 4


async def test_manager_that_does_not_lead_requests_nothing(system: System) -> None:
    system.manager.recovered = False
    await system.pass_s(1)
    assert not system.cloud.requests


async def test_fleet_never_costs_more_per_hour_than_its_limit() -> None:
    system = System(pools=[POOL], limit=5.0)
    await system.start()
    await system.http.post("/fleet/scale", json={"workers": 4})
    await system.pass_s(1)
    assert system.cloud.requests == [("sim", 2)]
    fleet = await system.fleet()
    assert (fleet["limited_by"], fleet["max_dollars_per_hour"]) == ("max_dollars_per_hour", 5.0)
    await system.http.aclose()


async def test_price_file_prices_workers_their_pool_and_what_the_fleet_may_cost(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("as_of: 2026-10-01\nworkers: {sim: 3.0}\n", encoding="utf-8")
    system = System(pools=[POOL], limit=7.0, price_file=str(tmp_path / "prices.yaml"))
    await system.start()
    await system.http.post("/fleet/scale", json={"workers": 4})
    await system.pass_s(1)
    assert system.cloud.requests == [("sim", 2)]
    assert await system.manager.try_lead()  # rebuilt from what the workers said of themselves
    await system.pass_s(1)
    fleet = await system.fleet()
    assert (fleet["dollars_per_hour"], fleet["pools"][0]["price_per_hour"]) == (6.0, 3.0)
    assert [worker["price_per_hour"] for worker in (await system.http.get("/workers")).json()] == [3.0, 3.0]
    await system.http.aclose()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, r"PRICE_FILE: prices .*: No such file"),
        ("workers: {sim: cheap}", r"workers\.sim: .*'rlboost prices'"),
    ],
)
async def test_manager_with_an_unusable_price_file_exits_and_says_what_to_do(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "prices.yaml").write_text(text, encoding="utf-8")
    config = read(Settings, ["--price-file", str(tmp_path / "prices.yaml"), "--redis-url", "redis://127.0.0.1:1/0"])
    with pytest.raises(ConfigError, match=problem):
        await main(config, asyncio.Event())


async def test_scale_without_pools_says_what_to_set() -> None:
    system = System(pools=[])
    await system.start()
    answer = await system.http.post("/fleet/scale", json={"workers": 4})
    assert answer.status_code == 409
    assert "RLBOOST_MANAGER_POOLS" in answer.json()["detail"]
    await system.http.aclose()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--provider", "kubernetes"], "no kind of worker to start: set RLBOOST_MANAGER_POOLS"),
        (["--provider", "command", "--pools", f"[{POOL.model_dump_json()}]"], "set RLBOOST_MANAGER_PROVIDER_COMMAND"),
        (["--pools", '[{"kind": "a b", "max_workers": 1}]'], "kind"),
        (["--pools", f"[{POOL.model_dump_json()}, {POOL.model_dump_json()}]"], "several pools are of kind sim"),
    ],
)
def test_unusable_autoscaling_settings_are_refused(args: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(Settings, args)
