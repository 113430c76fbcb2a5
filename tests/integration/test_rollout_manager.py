"""The real manager process on a real Redis, with workers and a trainer played by the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from rlboost.client import ServerEvent, server_events
from rlboost.services.rollout_manager.api.jobs import IDEMPOTENCY_TTL_S
from rlboost.services.rollout_manager.domain.effects import ENDED_SAMPLES_RETENTION_S
from rlboost.shared.messages import (
    ENDED_JOB_RETENTION_S,
    JobReport,
    SampleDropped,
    SeedingEnded,
    SeedingReopened,
)
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.wire import I32, ints
from tests.support import played_job
from tests.support.eventually import eventually
from tests.support.played_job import PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.sim_worker import RESIDENT_BYTES
from tests.support.stopwatch import Stopwatch

SPEC = {**played_job.SPEC, "elastic": {"seeding": 1.0}}


class System(PlayedJob):
    """A manager, a Redis, and what plays the rest."""

    def __init__(self, redis: RedisServer, directory: Path) -> None:
        super().__init__(RedisBus(redis.url), forgives_outages=True)
        self.redis = redis
        self.manager = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", directory, redis.url, {})
        self.http = httpx.AsyncClient(base_url=self.manager.url, headers={"Authorization": f"Bearer {TOKEN}"})

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    redis = RedisServer(tmp_path / "redis", aof=True)
    redis.start()
    system = System(redis, tmp_path)
    try:
        system.manager.start()
        await system.create(system.http, system.manager.url, **SPEC)
        yield system
    finally:
        await system.stop_workers()
        await system.http.aclose()
        await system.bus.close()
        system.manager.kill()
        redis.stop()


async def test_samples_are_generated_and_delivered_once_each(system: System) -> None:
    system.start_worker("w1")
    system.start_worker("w2")
    await system.request()
    samples = await system.delivered(32)
    assert {len(ints(s.tokens, I32)) for s in samples} == {40}
    assert sum(s.group_done for s in samples) == 4
    audit = await system.get(f"/v1/jobs/{system.id}/audit")
    assert audit["requested"] == audit["delivered"] == 32
    assert audit["tokens_generated"] == audit["tokens_delivered"] == 32 * 40
    assert audit["in_flight"] == 0


async def test_samples_of_a_dead_worker_are_reassigned_within_3_s(system: System) -> None:
    """Three seconds is the limit until the worker counts as lost."""
    system.start_worker("w1", pace_s=0.05)
    await system.request(groups=1, max_tokens=60)
    await eventually(lambda: _generated(system, 80))
    system.kill_worker("w1")
    since_death = Stopwatch()
    system.start_worker("w2", pace_s=0.01)

    async def lost() -> bool:
        return any(w["id"] == "w1" and w["state"] == "lost" for w in await system.get("/v1/workers"))

    await eventually(lost)
    assert since_death.read() < 3.0
    memory = [(w["resident_bytes"], w["device_used_bytes"]) for w in await system.get("/v1/workers")]
    assert memory == [(RESIDENT_BYTES, None)] * 2
    samples = await system.delivered(8)
    assert all(len(s.spans) == 2 and s.attempts == 2 for s in samples)
    audit = await system.get(f"/v1/jobs/{system.id}/audit")
    assert audit["preemptions"] == {"without_notice": 1}
    assert audit["migrations"] == 8
    assert audit["tokens_saved"] >= 80
    assert audit["tokens_generated"] == audit["tokens_delivered"] == 8 * 60


async def _generated(system: System, n: int) -> bool:
    return bool((await system.get(f"/v1/jobs/{system.id}/audit"))["tokens_generated"] >= n)


async def test_manager_killed_in_mid_step_resumes_the_step(system: System) -> None:
    system.start_worker("w1")
    system.start_worker("w2")
    await system.request(groups=8, max_tokens=80)
    for n in (200, 1200, 2500):
        await eventually(partial(_generated, system, n))
        system.manager.kill()
        system.manager.start()
    await system.delivered(64)
    audit = await system.get(f"/v1/jobs/{system.id}/audit")
    assert audit["requested"] == audit["delivered"] == 64
    made_again = sum(audit["tokens_regenerated"].values())
    assert audit["tokens_generated"] - made_again == audit["tokens_delivered"] == 64 * 80


async def test_redis_killed_in_mid_step_loses_nothing(system: System) -> None:
    system.start_worker("w1")
    await system.request(groups=4, max_tokens=60)
    await eventually(lambda: _generated(system, 300))
    system.redis.restart()
    await system.delivered(32)


async def test_a_worker_that_was_only_silent_is_dismissed_and_cannot_corrupt_a_sample(system: System) -> None:
    worker = system.start_worker("w1", pace_s=0.05)
    await system.request(groups=1, max_tokens=60)
    await eventually(lambda: _generated(system, 80))
    system.kill_worker("w1")  # it stops beating, but it lives and has unsent tokens
    worker.generate(20)
    system.start_worker("w2", pace_s=0.02)

    async def moved() -> bool:
        return bool((await system.get(f"/v1/jobs/{system.id}/audit"))["migrations"] == 8)

    await eventually(moved)
    await worker.flush()
    await system.delivered(8)
    await worker.execute_commands()
    assert worker.dismissed
    audit = await system.get(f"/v1/jobs/{system.id}/audit")
    assert audit["tokens_regenerated"] == {"late": 160}


async def test_the_reserved_engine_generates_for_the_window_and_then_hands_over_its_tokens(system: System) -> None:
    system.start_worker("reserved", "reserved", pace_s=0.02)
    system.start_worker("spot", pace_s=0.01)
    await eventually(lambda: _states(system, {"reserved": "suspended", "spot": "ready"}))
    await system.request(groups=2, max_tokens=200)
    samples = await system.delivered(16)
    ended = [m for m in await system.finished() if isinstance(m, SeedingEnded)]
    assert [m.reason for m in ended] == ["window"]
    assert 1.0 <= ended[0].window_s < 4.0
    moved = [s for s in samples if [worker for worker, _, _ in s.spans] == ["reserved", "spot"]]
    assert moved
    assert await _states(system, {"reserved": "suspended"})


async def test_with_reserved_workers_alone_the_window_lasts_until_all_is_generated(system: System) -> None:
    system.start_worker("reserved", "reserved", pace_s=0.01)
    await system.request(groups=1)
    await system.delivered(8)

    async def ended() -> bool:
        return [m.reason for m in await system.finished() if isinstance(m, SeedingEnded)] == ["finished"]

    await eventually(ended)


async def test_window_reopens_after_the_last_spot_worker_was_lost(system: System) -> None:
    system.start_worker("reserved", "reserved", pace_s=0.01)
    system.start_worker("spot", pace_s=0.05)
    await eventually(lambda: _states(system, {"spot": "ready"}))
    await system.request(groups=2, max_tokens=200)

    async def ended() -> bool:
        return any(isinstance(m, SeedingEnded) for m in await system.finished())

    await eventually(ended)
    system.kill_worker("spot")
    await system.delivered(16)
    kinds = [type(m) for m in await system.finished() if isinstance(m, SeedingEnded | SeedingReopened)]
    assert kinds[:2] == [SeedingEnded, SeedingReopened]


async def _states(system: System, wanted: dict[str, str]) -> bool:
    states = {worker["id"]: worker["state"] for worker in await system.get("/v1/workers")}
    return all(states.get(name) == state for name, state in wanted.items())


async def test_a_cancelled_job_drops_its_samples_with_the_reason(system: System) -> None:
    system.start_worker("w1", pace_s=0.05)
    await system.request(groups=1, max_tokens=10_000)
    await eventually(lambda: _generated(system, 8))
    assert (await system.http.post(f"/v1/jobs/{system.id}/cancel")).status_code == 202

    async def cancelled() -> bool:
        return bool((await system.get(f"/v1/jobs/{system.id}"))["state"] == "cancelled")

    async def dropped() -> list[SampleDropped]:
        return [m for m in await system.finished() if isinstance(m, SampleDropped)]

    await eventually(cancelled)
    samples = await eventually(dropped)  # written at the end of the turn that cancels the job
    assert len(samples) == 8
    assert {m.reason for m in samples} == {"job cancelled"}
    assert (await system.http.post(f"/v1/jobs/{system.id}/cancel")).status_code == 202
    assert (await system.http.post(f"/v1/jobs/{system.id}/pause")).status_code == 409


async def test_all_that_a_cancelled_job_leaves_expires(system: System) -> None:
    """Without a worker, its dropped samples are the first entries of its stream."""
    await system.request(groups=1)

    async def requested() -> bool:
        return bool((await system.get(f"/v1/jobs/{system.id}/audit"))["requested"] == 8)

    await eventually(requested)
    await system.http.post(f"/v1/jobs/{system.id}/cancel")

    async def dropped() -> bool:
        return len([m for m in await system.finished() if isinstance(m, SampleDropped)]) == 8

    await eventually(dropped)
    async with redis.asyncio.from_url(system.redis.url) as client:
        left = {key: await client.ttl(key) for key in await client.keys(f"rlboost:job:{system.id}:*")}
    assert 0 < left[names.rollouts_finished(system.id).encode()] <= ENDED_SAMPLES_RETENTION_S
    assert all(0 < ttl_s <= ENDED_JOB_RETENTION_S for ttl_s in left.values()), left


async def test_log_is_trimmed_up_to_delivered_samples(system: System) -> None:
    system.start_worker("w1", pace_s=0.005)
    await system.request(groups=4)
    await system.delivered(32)

    async def short() -> bool:
        return await system.bus.length(names.TOKEN_LOG) <= 1

    await eventually(short)
    assert await system.bus.length(names.rollouts_requested(system.id)) == 0


async def test_bad_requests_are_answered_with_problem_details(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.manager.url) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = await stranger.get("/v1/jobs", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["content-type"] == "application/problem+json"
            assert "Authorization: Bearer" in answer.json()["detail"]
        assert (await stranger.get("/healthz")).status_code == 200
    answer = await system.http.post("/v1/jobs", json={**SPEC, "stepz": 3, "data": {}})
    assert answer.status_code == 422
    assert {e["field"] for e in answer.json()["errors"]} == {"stepz", "data.train"}
    answer = await system.http.post("/v1/jobs", json={**SPEC, "kind": "sft", "stepz": 3})
    refused = [e["field"] for e in answer.json()["errors"]]
    assert {"reward", "stepz"} <= set(refused)
    assert answer.json()["detail"].startswith("a job of kind sft generates nothing: remove ")
    assert (await system.http.get("/v1/jobs/none")).status_code == 404
    assert (await system.http.get("/nothing")).headers["content-type"] == "application/problem+json"
    # A client of OpenAI's API may ask for any route below /v1.
    assert (await system.http.get("/v1/nothing")).json()["error"]["code"] == "unknown_url"
    assert (await system.http.post("/v1/workers/none/drain")).status_code == 404


async def test_creating_with_the_same_idempotency_key_makes_one_job(system: System) -> None:
    headers = {"Idempotency-Key": "once"}
    first = await system.http.post("/v1/jobs", json=SPEC, headers=headers)
    second = await system.http.post("/v1/jobs", json=SPEC, headers=headers)
    assert first.status_code == second.status_code == 201
    assert first.json()["id"] == second.json()["id"]
    assert len(await system.get("/v1/jobs")) == 2
    async with redis.asyncio.from_url(system.redis.url) as client:
        assert 0 < await client.pttl(names.job_created("once")) / 1000 <= IDEMPOTENCY_TTL_S
    other = await system.http.post("/v1/jobs", json={**SPEC, "steps": 77}, headers=headers)
    assert other.status_code == 409
    assert f"has created job {first.json()['id']} from another job file" in other.json()["detail"]
    for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):  # clients may send an object's keys in any order
        job_file = {**SPEC, "reward": {"function": "a:b", "arguments": arguments}}
        same = await system.http.post("/v1/jobs", json=job_file, headers={"Idempotency-Key": "order"})
        assert same.status_code == 201
    refused = await system.http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k" * 300})
    assert refused.status_code == 422


async def test_report_of_an_unknown_job_is_dead_lettered(system: System) -> None:
    await system.bus.append(names.JOB_REPORTS, JobReport(job_id="unknown", state="running", step=0))

    async def dead_lettered() -> bool:
        return await system.bus.length(names.DEAD_LETTERS) == 1

    await eventually(dead_lettered)


async def test_events_can_be_followed_and_resumed(system: System) -> None:
    system.start_worker("w1")
    await system.request(groups=1)
    await system.delivered(8)
    seen = await _read_events(system, {}, lambda kinds: "worker_joined" in kinds and "job_state_changed" in kinds)
    rest = await _read_events(system, {"Last-Event-ID": seen[0][0]}, lambda kinds: len(kinds) >= len(seen) - 1)
    assert rest[: len(seen) - 1] == seen[1:]
    present = await system.http.get(_events_path(system), params={"follow": 0})  # ends although the job has not
    assert "event: worker_joined" in present.text


async def test_event_of_the_fleet_is_stored_once_and_shown_with_the_jobs_it_concerns(system: System) -> None:
    pending = [(await system.http.post("/v1/jobs", json=SPEC)).json()["id"] for _ in range(20)]
    system.start_worker("w1")
    await system.request(groups=1)
    await system.delivered(8)

    async def read(job_id: str, **headers: str) -> list[ServerEvent]:
        shown = await system.http.get(f"/v1/jobs/{job_id}/events", params={"follow": 0}, headers=headers)
        return list(server_events(iter(shown.text.splitlines())))

    own = await read(system.id)
    assert [event.kind for event in own].count("worker_joined") == 1
    assert {event.data["fields"]["job_id"] for event in own if event.kind == "worker_state"} == {system.id}
    for job_id in pending:
        assert await system.bus.length(names.job_events(job_id)) == 0
        of_workers = [event.data["fields"] for event in await read(job_id) if event.kind == "worker_state"]
        assert {fields["job_id"] for fields in of_workers} <= {""}, "the worker serves another job"
    for number, event in enumerate(own):
        rest = await read(system.id, **{"Last-Event-ID": event.id})
        assert rest == own[number + 1 :], "nothing is lost or repeated, whichever stream the last event is of"
    later = (await system.http.post("/v1/jobs", json=SPEC)).json()["id"]
    assert "worker_joined" not in {event.kind for event in await read(later)}


async def test_emptied_redis_is_reported_and_numbers_no_job_twice(system: System) -> None:
    """Not killed, so that the same manager finds it empty, as after a restart in another folder."""
    system.redis.flush()

    async def failed() -> bool:
        try:
            job = await system.get(f"/v1/jobs/{system.id}")
        except (AssertionError, httpx.TransportError):  # no leader for a moment
            return False
        return bool(job["state"] == "failed" and "Redis has lost its data" in job["error"])

    await eventually(failed)
    assert '"redis_lost_data"' in system.manager.log()
    followed = await system.http.get(f"/v1/jobs/{system.id}/events")
    assert "trainer.resume" in followed.text
    assert (await system.http.post("/v1/jobs", json=SPEC)).status_code == 201
    async with redis.asyncio.from_url(system.redis.url) as client:
        records = [json.loads(record) for record in (await client.hgetall(names.JOBS)).values()]
    assert sorted(record["no"] for record in records) == [1, 2]


async def test_metrics_are_listed_from_a_step_on(system: System) -> None:
    await system.bus.transact([HashSet(names.job_metrics(system.id), {"0": "{}", "3": '{"loss": 1.0}'})])
    assert [row["step"] for row in await system.get(f"/v1/jobs/{system.id}/metrics")] == [0, 3]
    assert await system.get(f"/v1/jobs/{system.id}/metrics?from_step=1") == [{"step": 3, "loss": 1.0}]


async def test_a_hundred_followers_of_events_do_not_stop_the_manager(system: System) -> None:
    """More than a pool has connections, and for longer than the leader's lease."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=system.manager.url, headers=headers, limits=limits) as http:

        async def follow() -> bool:
            async with asyncio.timeout(60), http.stream("GET", _events_path(system)) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if '"state":"completed"' in line:
                        return True
            return False

        async with asyncio.TaskGroup() as group:
            followers = [group.create_task(follow(), name=f"follower-{i}") for i in range(100)]
            limit = time.monotonic() + 5
            while time.monotonic() < limit:
                assert (await system.get("/readyz"))["ready"]
                assert len(await system.get("/v1/jobs")) == 1
                await asyncio.sleep(0.05)
            await system.bus.append(names.JOB_REPORTS, JobReport(job_id=system.id, state="completed", step=9))
        assert all(follower.result() for follower in followers)
    assert await system.bus.lease_values([names.MANAGER_EPOCH]) == ["1"]


async def _read_events(
    system: System, headers: dict[str, str], enough: Callable[[list[str]], bool]
) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    async with asyncio.timeout(60), system.http.stream("GET", _events_path(system), headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        entry_id = ""
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                entry_id = line.removeprefix("id: ")
            elif line.startswith("event: "):
                events.append((entry_id, line.removeprefix("event: ")))
                if enough([kind for _, kind in events]):
                    return events
    raise AssertionError("the stream ended")


def _events_path(system: System) -> str:
    return f"/v1/jobs/{system.id}/events"


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(tmp_path: Path, redis_url: str) -> None:
    first = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", tmp_path, redis_url, {})
    first.start()
    try:
        second = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", tmp_path, redis_url, {})
        second.env["RLBOOST_MANAGER_PORT"] = str(first.port)
        second.launch()
        assert second.wait() == 2
        assert f"cannot listen on 127.0.0.1:{first.port}" in second.log()
    finally:
        assert first.stop() == 0
