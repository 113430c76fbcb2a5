"""The manager follows the number of workers worth having, with a provider whose machines a test plays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.services.rollout_manager.__main__ import main
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.autoscale import COOL_DOWN_S
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.offers import NO_CAPACITY, RETRY_S, UNFILLED_S, AwsMachine, Failure, Pool
from rlboost.services.rollout_manager.domain.windows import WindowTuner
from rlboost.services.rollout_manager.fleet_loops import PRICE_EVERY_S, REPEAT_S, FleetScaler
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import Event, JobReport
from rlboost.shared.messages.jobs import JobState
from rlboost.shared.settings import read
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.jobs import job_file
from tests.support.manager_fakes import FakeProvider
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker

DELAY_S = 300.0
POOL = Pool(kind="sim", max_workers=4, price_per_hour=2.0)
AWS_POOL = '{"kind": "a", "aws": {"instance_type": "g6.xlarge", "zone": "us-east-1a", "launch_template": "spot"}}'


class System:
    """A leading manager on a fake bus, one running job, and workers that appear as the provider is asked for them."""

    def __init__(self, *, pools: list[Pool], limit: float | None = None, price_file: str = "") -> None:
        self.bus, self.at_s = MemoryBus(), 0.0
        self.clouds = {pool.kind: FakeProvider({pool.kind}) for pool in pools}
        limits: dict[str, Any] = {"max_dollars_per_hour": limit, "scale_in_delay_s": DELAY_S}
        settings = Settings(token="t", pools=pools, price_file=price_file, aws_system="test", **limits)
        self.manager = Manager(self.bus, lease_s=1e9, redis_limit_s=1.0, prices=settings.prices)
        self.scaler = FleetScaler(self.manager, self.bus, settings, self.clouds)
        transport = httpx.ASGITransport(build(self.manager, self.bus, settings, scaler=self.scaler))
        headers = {"Authorization": "Bearer t"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://manager/v1", headers=headers)
        self.workers: list[SimWorker] = []
        self.job = ""

    @property
    def cloud(self) -> FakeProvider:
        """What starts workers of the first pool."""
        return next(iter(self.clouds.values()))

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
        for kind, cloud in self.clouds.items():
            wanted = cloud.requests[-1][1] if cloud.requests and not cloud.error else 0
            while len(self.of_kind(kind)) < wanted:
                await self.join(kind)
        await self.manager.turn()
        for worker in self.workers:
            await worker.execute_commands()
        await self.manager.turn()

    async def join(self, kind: str = POOL.kind) -> None:
        self.workers.append(SimWorker(self.bus, f"w{len(self.workers)}", kind=kind, lease_s=1e9))
        await self.workers[-1].join()

    def of_kind(self, kind: str) -> list[str]:
        return [worker.id for worker in self.workers if not worker.dismissed and worker.kind == kind]

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
    known = {"present": 1, "target": 1, "error": None, "closed": None, "availability": 1.0}
    unknown = {"dollars_per_million_tokens": None}
    assert pool == {**POOL.model_dump(exclude={"command", "aws"}), **known, **unknown}


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
    assert await system.fleet_events() == [
        {"worker_kind": "sim", "workers": 1, "before": 3, "reason": "1 x sim: these do the work"}
    ]


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


ZONES = [Pool(kind="a", gpu="L4", place="zone a"), Pool(kind="b", gpu="L4", place="zone b")]


async def zones(tmp_path: Path, prices: str) -> System:
    (tmp_path / "prices.yaml").write_text(prices, encoding="utf-8")
    system = System(pools=ZONES, price_file=str(tmp_path / "prices.yaml"))
    await system.start()
    system.want(2)
    await system.pass_s(1)
    return system


async def test_fleet_moves_to_another_zone_when_prices_change(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    assert (len(system.of_kind("a")), len(system.of_kind("b"))) == (2, 0)
    (tmp_path / "prices.yaml").write_text("workers: {a: 2.0, b: 1.2}", encoding="utf-8")
    os.utime(tmp_path / "prices.yaml", (1.0, 1.0))
    for _ in range(8):
        await system.pass_s(60)
    assert (len(system.of_kind("a")), len(system.of_kind("b"))) == (0, 2)
    why = "2 x L4 in zone b: 40 % cheaper per token than L4 in zone a"
    assert (await system.fleet())["reason"] == why
    assert {event["reason"] for event in await system.fleet_events()} == {why}
    await system.http.aclose()


async def test_price_file_that_becomes_unusable_leaves_the_prices_before(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    for text in ("workers: {a: cheap}", "workers: {a: 3.0}"):
        (tmp_path / "prices.yaml").write_text(text, encoding="utf-8")
        os.utime(tmp_path / "prices.yaml", (len(text), len(text)))
        await system.pass_s(60)
    assert [pool["price_per_hour"] for pool in (await system.fleet())["pools"]] == [1.0, 1.2]
    await system.http.aclose()


async def test_new_leader_uses_the_price_file_as_it_is_now(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    (tmp_path / "prices.yaml").write_text("workers: {a: 2.0, b: 1.2}", encoding="utf-8")
    os.utime(tmp_path / "prices.yaml", (1.0, 1.0))
    await system.pass_s(1)
    assert await system.manager.try_lead()
    for _ in range(2):
        await system.pass_s(1)
    assert [pool["price_per_hour"] for pool in (await system.fleet())["pools"]] == [2.0, 1.2]
    await system.http.aclose()


async def test_requests_last_until_the_stop_also_without_providers() -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        requests = tasks.create_task(System(pools=[]).scaler.run_requests(stop))
        await asyncio.sleep(0)
        assert not requests.done()
        stop.set()


async def test_zone_that_fails_is_left_to_others_and_asked_again_later(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    system.clouds["a"].error = "no quota"
    system.want(4)
    for seconds in (COOL_DOWN_S, 1, 1):
        await system.pass_s(seconds)
    assert (len(system.of_kind("a")), len(system.of_kind("b"))) == (2, 2)
    assert (await system.fleet())["reason"] == "2 x L4 in zone b: L4 in zone a starts no workers"
    system.clouds["a"].error = ""
    for seconds in (RETRY_S, *[60] * 8):
        await system.pass_s(seconds)
    assert (len(system.of_kind("a")), len(system.of_kind("b"))) == (4, 0)
    await system.http.aclose()


async def test_zone_with_part_of_the_machines_keeps_those_that_start_and_others_do_the_rest(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    system.clouds["a"].error, system.clouds["a"].failure = "1 of 2", Failure(NO_CAPACITY, UNFILLED_S, workers=3)
    system.want(4)
    for seconds in (COOL_DOWN_S, 1, 1):
        await system.pass_s(seconds)
    await system.pass_s(UNFILLED_S - 5)
    targets = {pool["kind"]: pool["target"] for pool in (await system.fleet())["pools"]}
    assert targets == {"a": 3, "b": 1}  # two are there, and one starts
    assert system.clouds["a"].requests == [("a", 2), ("a", 4)]
    assert (await system.fleet())["reason"] == "1 x L4 in zone b: L4 in zone a has no capacity"
    await system.pass_s(10)
    assert system.clouds["a"].requests[2:] == [("a", 3)]
    await system.http.aclose()


async def test_machines_that_start_are_not_given_up_when_their_provider_is_not_reached(tmp_path: Path) -> None:
    system = await zones(tmp_path, "workers: {a: 1.0, b: 1.2}")
    system.want(4)
    system.at_s += COOL_DOWN_S
    await system.scaler.decide_once(Now(system.at_s, system.at_s))
    await system.scaler.request_once(system.at_s)
    assert system.clouds["a"].requests[-1] == ("a", 4)
    assert system.clouds["a"].hosts == ["here", "here"]
    system.clouds["a"].error = "not reached"
    for seconds in (REPEAT_S, 1, RETRY_S, 1):
        await system.pass_s(seconds)
    assert len(system.clouds["a"].requests) == 4
    targets = {pool["kind"]: pool["target"] for pool in (await system.fleet())["pools"]}
    assert targets == {"a": 4, "b": 0}
    for seconds in (UNFILLED_S + max(pool.boot_s for pool in ZONES), 1, 1):
        await system.pass_s(seconds)
    targets = {pool["kind"]: pool["target"] for pool in (await system.fleet())["pools"]}
    assert targets == {"a": 2, "b": 2}
    await system.http.aclose()


async def test_pool_of_aws_starts_workers_once_its_price_is_known_and_follows_it() -> None:
    system = System(pools=[aws_pool("a"), aws_pool("b"), Pool(kind="own", max_workers=4, price_per_hour=9.0)])
    await system.start()
    system.clouds["a"].error = "not permitted"
    system.clouds["b"].prices = {"b": 1.0}
    system.want(2)
    await system.pass_s(COOL_DOWN_S)
    a = (await system.fleet())["pools"][0]
    assert (a["target"], a["closed"], a["error"]) == (0, "has no known price", "not permitted")
    for _ in range(2):
        await system.pass_s(1)
    assert len(system.of_kind("b")) == 2
    assert [system.manager.world.fleet.workers[worker].price_per_hour for worker in system.of_kind("b")] == [1.0] * 2
    system.clouds["a"].error, system.clouds["a"].prices = "", {"a": 0.5}
    for seconds in (PRICE_EVERY_S, *[10.0] * 12):
        await system.pass_s(seconds)
    assert (len(system.of_kind("a")), len(system.of_kind("b"))) == (2, 0)
    assert (await system.fleet())["reason"] == "2 x a in us-east-1a: 50 % cheaper per token than b in us-east-1a"
    await system.http.aclose()


def aws_pool(kind: str) -> Pool:
    machine = AwsMachine(instance_type="g6.xlarge", zone="us-east-1a", launch_template="spot")
    return Pool(kind=kind, max_workers=4, aws=machine)


async def test_deadline_that_no_mix_meets_is_reported_with_the_earliest_time() -> None:
    system = System(pools=[POOL])
    await system.start()
    world = system.manager.world
    job = world.jobs[system.job]
    finish_by = datetime.fromtimestamp(1000.0, UTC)
    elastic = job.record.spec.elastic.model_copy(update={"finish_by": finish_by})
    job.record.spec = job.record.spec.model_copy(update={"elastic": elastic, "steps": 100})
    job.record.window_tuner = WindowTuner(target_workers=2, work_s=550.0, train_s=100.0, step_s=700.0)
    for _ in range(2):
        await system.pass_s(1)
    entries = await system.bus.read({names.job_events(system.job): START})
    events = [entry.message for entry in entries if isinstance(entry.message, Event)]
    (found,) = [event.fields for event in events if event.kind == "deadline_unreachable"]
    shown = (await system.http.get(f"/jobs/{system.job}")).json()["finishes_at"]
    assert datetime.fromisoformat(found["finishes_at"]).timestamp() == pytest.approx(
        datetime.fromisoformat(shown).timestamp(), abs=5
    )
    assert datetime.fromisoformat(shown) > finish_by
    await system.http.aclose()


@pytest.mark.parametrize(
    ("pools", "finish_by", "status", "text"),
    [
        ([], "2100-01-01T00:00:00Z", 409, "set RLBOOST_MANAGER_POOLS"),
        ([POOL], "2020-01-01T00:00:00Z", 422, "is over: give a later time"),
        ([POOL], "2100-01-01T00:00:00", 422, "elastic.finish_by"),
        ([POOL], "2100-01-01T00:00:00+01:00", 201, ""),
    ],
)
async def test_job_with_a_deadline_that_cannot_work_is_refused(
    pools: list[Pool], finish_by: str, status: int, text: str
) -> None:
    system = System(pools=pools)
    assert await system.manager.try_lead()
    answer = await system.http.post("/jobs", json=job_file(elastic={"finish_by": finish_by}))
    assert (answer.status_code, text in answer.text) == (status, True)
    await system.http.aclose()


async def test_deadline_of_a_policy_is_checked_as_that_of_its_job() -> None:
    system = System(pools=[POOL])
    assert await system.manager.try_lead()
    policies = {"verifier": {"model": "v", "elastic": {"finish_by": "2020-01-01T00:00:00Z"}}}
    answer = await system.http.post("/jobs", json=job_file(agent={"function": "m:f"}, policies=policies))
    assert (answer.status_code, "is over: give a later time" in answer.text) == (422, True)
    await system.http.aclose()


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
        (["--pools", '[{"kind": "a", "provider": "gcp"}]'], "provider"),
        (["--pools", '[{"kind": "a", "provider": "kubernetes", "command": "true"}]'], "does not use: remove one"),
        (["--pools", '[{"kind": "a", "provider": "aws"}]'], "needs the key aws of a: its instance_type, zone"),
        (["--pools", f"[{AWS_POOL}]"], "set RLBOOST_MANAGER_AWS_SYSTEM"),
        (["--pools", f"[{AWS_POOL.replace('us-east-1a', 'us-east-1')}]"], "zone"),
        (["--pools", f'[{AWS_POOL[:-1]}, "command": "true"}}]'], "needs one provider: remove one"),
        (["--pools", f'[{AWS_POOL[:-1]}, "boot_s": 1800}}]'], "use an image that is prepared, and lower it"),
        (["--pools", '[{"kind": "a"}, {"kind": "b"}]', "--max-share", "0.4"], "needs 3 pools, and there are 2"),
        (["--pools", '[{"kind": "a b", "max_workers": 1}]'], "kind"),
        (["--pools", f"[{POOL.model_dump_json()}, {POOL.model_dump_json()}]"], "several pools are of kind sim"),
    ],
)
def test_unusable_autoscaling_settings_are_refused(args: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(Settings, args)


def test_pool_without_a_price_among_priced_ones_is_refused_by_name() -> None:
    pools = [Pool(kind="a"), Pool(kind="free", price_per_hour=0.0), Pool(kind="b", price_per_hour=2.0)]
    with pytest.raises(ConfigError, match=r"a cannot be compared .* set its price_per_hour \(0: it is free\)"):
        _ = Settings(token="t", pools=pools).prices
