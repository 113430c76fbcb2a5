"""A job that a manager cannot read fails with the reason, and the others continue."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from rlboost.shared.messages import DeadLetter, JobCommand, SampleFinished
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
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

    async def dead_letters(self) -> list[DeadLetter]:
        found = [entry.message for entry in await read_all(self.bus, names.DEAD_LETTERS)]
        return [letter for letter in found if isinstance(letter, DeadLetter)]


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


async def test_unreadable_job_fails_with_the_reason_and_others_continue(system: System) -> None:
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
    unreadable = of_a_newer_version(await system.record(first))
    await system.redis.hset(names.JOBS, first.id, unreadable)
    system.manager.start()

    assert len(await second.delivered(32)) == 32
    shown, other = await system.get("/v1/jobs")
    assert (shown["id"], shown["name"], shown["state"], shown["waiting"]) == (first.id, "t", "failed", None)
    assert f"field {first.id} of the hash {names.JOBS} in Redis cannot be parsed" in shown["error"]
    assert "algorithm.invented_later: unknown key" in shown["error"]
    assert "trainer.resume" in shown["error"]
    assert (other["id"], other["state"]) == (second.id, "running")
    assert await system.get(f"/v1/jobs/{first.id}") == shown
    refused = await system.http.post(f"/v1/jobs/{first.id}/pause")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"job {first.id} is failed: it cannot be paused")
    assert "cannot be parsed" in (await system.http.get(f"/v1/jobs/{first.id}/logs")).text
    audit = await system.audit(first)
    assert (audit["requested"], audit["delivered"] + sum(audit["dropped"].values()), audit["in_flight"]) == (32, 32, 0)
    (stop,) = [entry.message for entry in await read_all(system.bus, names.JOB_CONTROLS)]
    assert isinstance(stop, JobCommand)
    assert (stop.action, stop.job_id) == ("cancel", first.id)

    system.manager.kill()
    system.manager.start()
    assert (await system.get(f"/v1/jobs/{first.id}"))["error"] == shown["error"]
    (letter,) = await system.dead_letters()
    assert (letter.stream, letter.entry_id, letter.body) == (names.JOBS, first.id, unreadable)


@pytest.mark.parametrize(
    ("record", "why"),
    [(b'{"id": "', "Invalid JSON"), (b'{"spec": {"name": "\xff"}}', "unicode string"), (b"[]", "")],
    ids=["torn", "no text", "no record"],
)
async def test_any_damaged_record_fails_its_job(system: System, record: bytes, why: str) -> None:
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
    assert [job["name"] for job in shown.values()] == ["t", "t"]
    (letter,) = [letter for letter in await system.dead_letters() if letter.stream == names.JOBS]
    assert letter.body == record
    refused = await system.http.get(f"/v1/jobs/{first.id}/spec")
    assert (refused.status_code, refused.json()["title"]) == (409, "Unreadable job")
    assert "cannot be parsed" in refused.json()["detail"]
    assert (await system.http.get(f"/v1/jobs/{second.id}/spec")).json()["name"] == "t"
    assert why in shown[first.id]["error"]
    assert f"the hash {names.job_audit(second.id)} in Redis cannot be parsed" in shown[second.id]["error"]
    assert (shown[second.id]["name"], shown[second.id]["steps"]) == ("t", 9)
    third = PlayedJob(system.bus, number=3)
    await third.create(system.http, system.manager.url, elastic={"seeding": "off"})
    first.start_worker("w2")
    await third.request(max_tokens=4)
    assert all(isinstance(sample, SampleFinished) for sample in await third.delivered(32))


async def test_repeated_create_request_returns_the_failed_job(system: System) -> None:
    spec = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1}
    key = {"Idempotency-Key": "k"}
    made = (await system.http.post("/v1/jobs", json=spec, headers=key)).json()
    system.manager.kill()
    await system.redis.hset(names.JOBS, made["id"], "{}")
    system.manager.start()
    again = await system.http.post("/v1/jobs", json=spec, headers=key)
    assert (again.status_code, again.json()) == (201, {"id": made["id"], "state": "failed"})
