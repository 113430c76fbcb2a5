"""A job that a manager cannot read stands still beside the others, and goes on under a manager that can."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from rlboost.shared.messages import Event, SampleFinished, StepReport
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.wire.columns import I32, ints
from tests.support.eventually import eventually
from tests.support.played_job import PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.stream_entries import read_all


class System:
    """A manager, a Redis, and two jobs: workers are the first one's to start."""

    def __init__(self, redis_server: RedisServer, directory: Path) -> None:
        self.bus = RedisBus(redis_server.url)
        self.redis = redis.asyncio.Redis.from_url(redis_server.url)
        self.first = PlayedJob(self.bus)
        self.second = PlayedJob(self.bus, number=2)
        self.manager = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", directory, redis_server.url, {})
        self.http = httpx.AsyncClient(base_url=self.manager.url, headers={"Authorization": f"Bearer {TOKEN}"})

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def audit(self, job: PlayedJob) -> dict[str, Any]:
        found: dict[str, Any] = await self.get(f"/v1/jobs/{job.id}/audit")
        return found

    async def record(self, job: PlayedJob) -> bytes:
        found = await self.redis.hget(names.JOBS, job.id)
        assert isinstance(found, bytes)
        return found

    async def stored(self, job: PlayedJob) -> dict[Any, Any]:
        """Everything of a job but its events and logs."""
        found: dict[Any, Any] = {"record": await self.record(job)}
        async for key in self.redis.scan_iter(f"rlboost:job:{job.id}:*"):
            kind = await self.redis.type(key)
            found[key] = await (self.redis.hgetall(key) if kind == b"hash" else self.redis.dump(key))
        found["cursor"] = await self.redis.hget(names.MANAGER_CURSORS, names.rollouts_requested(job.id))
        for_people = {names.job_events(job.id).encode(), names.job_logs(job.id).encode()}
        return {key: value for key, value in found.items() if key not in for_people}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    server = RedisServer(tmp_path / "redis", aof=True)
    server.start()
    system = System(server, tmp_path)
    try:
        system.manager.start()
        for job in (system.first, system.second):
            await job.create(system.http, system.manager.url, elastic={"seeding": "off"})
        yield system
    finally:
        await system.first.stop_workers()
        await system.http.aclose()
        await system.redis.aclose()
        await system.bus.close()
        system.manager.kill()
        server.stop()


def of_a_newer_version(record: bytes) -> bytes:
    job = json.loads(record)
    job["spec"]["algorithm"]["invented_later"] = 1
    return json.dumps(job).encode()


async def test_unreadable_job_is_quarantined_and_continues_once_readable(system: System) -> None:
    first, second = system.first, system.second
    first.start_worker("w1", pace_s=0.05)
    first.start_worker("w2", pace_s=0.05)
    for job in (first, second):
        await job.request(max_tokens=40)

    async def some_of_each() -> bool:
        made: list[int] = [(await system.audit(job))["tokens_generated"] for job in (first, second)]
        return min(made) > 40

    await eventually(some_of_each)
    system.manager.kill()
    readable = await system.record(first)
    await system.redis.hset(names.JOBS, first.id, of_a_newer_version(readable))
    stored = await system.stored(first)
    system.manager.start()

    assert len(await second.delivered(32)) == 32
    shown, other = await system.get("/v1/jobs")
    assert (shown["id"], shown["state"], shown["waiting"]) == (first.id, "failed", None)
    assert f"field {first.id} of the hash {names.JOBS} in Redis cannot be parsed" in shown["error"]
    assert "algorithm.invented_later: unknown key" in shown["error"]
    assert "start the version of rlboost that wrote them" in shown["error"]
    assert (other["id"], other["state"]) == (second.id, "running")
    assert await system.get(f"/v1/jobs/{first.id}") == shown
    refused = await system.http.post(f"/v1/jobs/{first.id}/cancel")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"job {first.id} is {shown['error']}")
    assert "job_quarantined" in (await system.http.get(f"/v1/jobs/{first.id}/logs")).text
    events = [entry.message for entry in await read_all(system.bus, names.job_events(first.id))]
    assert shown["error"] in [
        e.fields["reason"] for e in events if isinstance(e, Event) and e.kind == "job_quarantined"
    ]
    assert await system.stored(first) == stored

    # Its trainer, which has read it long ago, says something still; then everything is started again.
    await system.bus.append(names.JOB_REPORTS, StepReport(job_id=first.id, step=0, metrics={"loss": 0.5}))
    await eventually(lambda: _kept(system))
    system.manager.kill()
    system.manager.start()
    assert (await system.get(f"/v1/jobs/{first.id}"))["error"] == shown["error"]
    system.manager.kill()
    assert await system.record(first) == of_a_newer_version(readable)
    await system.redis.hset(names.JOBS, first.id, readable)
    # By another worker, so that what was made before shows as a span of its own.
    await first.stop_workers()
    first.start_worker("w3", pace_s=0.05)
    system.manager.start()

    samples = await first.delivered(32)
    assert {len(ints(sample.tokens, I32)) for sample in samples} == {40}
    assert any(len(sample.spans) == 2 for sample in samples), "none of them went on from where it was"
    job = await system.get(f"/v1/jobs/{first.id}")
    assert (job["state"], job["step"], job["latest"], job["error"]) == ("running", 1, {"loss": 0.5}, None)
    audit = await system.audit(first)
    assert (audit["requested"], audit["delivered"], audit["in_flight"]) == (32, 32, 0)
    assert not await _kept(system)


async def _kept(system: System) -> bool:
    return bool(await system.redis.exists(names.job_quarantine(system.first.id)))


@pytest.mark.parametrize(
    ("record", "shown_as", "why"),
    [
        (b'{"id": "', "first", "Invalid JSON"),
        (b'{"spec": {"name": "\xff"}}', "?", "unicode string"),
        (b"[]", "first", ""),
    ],
    ids=["torn", "no text", "no record"],
)
async def test_any_damaged_record_of_a_job_quarantines_it(
    system: System, record: bytes, shown_as: str, why: str
) -> None:
    first, second = system.first, system.second
    first.start_worker("w1")
    await second.request(max_tokens=4)
    await second.delivered(32)
    system.manager.kill()
    await system.redis.hset(names.JOBS, first.id, record)
    await system.redis.hset(names.job_audit(second.id), "counters", "{")
    await system.redis.hset(names.FLEET, "w1", "who")
    system.manager.start()
    shown = {job["id"]: job for job in await system.get("/v1/jobs")}
    assert [job["state"] for job in shown.values()] == ["failed", "failed"]
    assert shown[first.id]["name"] == (first.id if shown_as == "first" else shown_as)
    assert why in shown[first.id]["error"]
    assert f"the hash {names.job_audit(second.id)} in Redis cannot be parsed" in shown[second.id]["error"]
    assert (shown[second.id]["name"], shown[second.id]["steps"]) == ("t", 9)
    third = PlayedJob(system.bus, number=3)
    await third.create(system.http, system.manager.url, elastic={"seeding": "off"})
    first.start_worker("w2")
    await third.request(max_tokens=4)
    assert all(isinstance(sample, SampleFinished) for sample in await third.delivered(32))


async def test_repeated_create_request_returns_the_quarantined_job(system: System) -> None:
    spec = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1}
    key = {"Idempotency-Key": "k"}
    made = (await system.http.post("/v1/jobs", json=spec, headers=key)).json()
    system.manager.kill()
    await system.redis.hset(names.JOBS, made["id"], "{}")
    system.manager.start()
    again = await system.http.post("/v1/jobs", json=spec, headers=key)
    assert (again.status_code, again.json()) == (201, {"id": made["id"], "state": "failed"})
    assert await system.redis.hget(names.JOBS, made["id"]) == b"{}"
