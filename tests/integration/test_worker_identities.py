"""What a worker's Redis user may do: a real manager, a real Redis, and an attacker who has joined as a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.exceptions import NoPermissionError

from rlboost.services.rollout_manager.access import SETTING
from rlboost.services.rollout_manager.domain.measurements import PROBE_SAMPLES
from rlboost.services.rollout_worker.adapters.manager_http import join
from rlboost.shared.errors import BusUnavailable, CredentialRejected
from rlboost.shared.messages import DeadLetter
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.weights.peers.directory import PeerDirectory
from tests.support.builders import token_frame
from tests.support.eventually import eventually
from tests.support.played_job import PlayedJob
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.sim_worker import SimWorker

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class System(PlayedJob):
    """A manager, its Redis, and workers with identities."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        super().__init__(RedisBus(server.url), forgives_outages=True)
        self.server, self.directory = server, directory
        self.manager = self.new_manager()
        self.http = httpx.AsyncClient(headers=HEADERS)
        self.joined: list[RedisBus] = []

    def new_manager(self, **settings: str) -> ServiceProcess:
        env = {f"RLBOOST_MANAGER_{name}": value for name, value in settings.items()}
        return ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", self.directory, self.server.url, env)

    def restart_manager(self, **settings: str) -> None:
        """Continue with other settings."""
        self.manager.kill()
        self.manager = self.new_manager(**settings)
        self.manager.start()

    async def worker(self) -> SimWorker:
        """Join as a real worker does; the bus has what the manager has answered, and no more."""
        membership = await join(self.manager.url, TOKEN, "w", "preemptible")
        assert isinstance(membership.bus, RedisBus)
        self.joined.append(membership.bus)
        return SimWorker(membership.bus, membership.worker, own_stream=True)

    async def states(self) -> dict[str, str]:
        workers = (await self.http.get(f"{self.manager.url}/v1/workers")).json()
        return {worker["id"]: worker["state"] for worker in workers}

    async def close(self) -> None:
        await self.stop_workers()
        for bus in (*self.joined, self.bus):
            await bus.close()
        await self.http.aclose()
        self.manager.kill()


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    server = RedisServer(tmp_path / "redis", aof=True)
    server.start()
    system = System(server, tmp_path)
    try:
        system.manager.start()
        await system.create(system.http, system.manager.url)
        yield system
    finally:
        await system.close()
        server.stop()


SHARED_STREAMS = (
    names.JOB_COMMANDS,
    names.JOB_REPORTS,
    names.TOKEN_LOG,
    names.WORKER_HEARTBEATS,
    names.WEIGHTS_COMMITTED,
    names.DEAD_LETTERS,
    names.FLEET_EVENTS,
    names.JOB_CONTROLS,
)


def attacks(own: str, other: str, job: str) -> list[tuple[str, ...]]:
    """Return the commands of an attacker."""
    streams = (
        *SHARED_STREAMS,
        names.job_events(job),
        names.job_logs(job),
        names.rollouts_requested(job),
        names.rollouts_finished(job),
        names.worker_commands(other),
        names.worker_reports(other),
    )
    return [
        *(("XADD", stream, "*", "m", "forged") for stream in streams),
        *(("XADD", stream, "MAXLEN", "0", "*", "m", "wiped") for stream in streams),
        *(("XTRIM", stream, "MAXLEN", "0") for stream in streams),
        *(("XDEL", stream, "1-0") for stream in streams),
        *(("XREAD", "STREAMS", stream, "0") for stream in streams),
        *(("SET", stream, "") for stream in streams),
        *(("DEL", stream) for stream in streams),
        ("SET", names.worker_lease(other), "alive"),
        ("SET", names.MANAGER_LEASE, "mine"),
        ("GET", names.MANAGER_LEASE),
        ("HGETALL", names.WORKER_IDENTITIES),
        ("HGETALL", names.FLEET),
        ("HGETALL", names.JOBS),
        ("HSET", names.WEIGHT_PEERS, other, ""),
        ("HSET", names.WORKER_IDENTITIES, own, "{}"),
        ("XREADGROUP", "GROUP", "trainer", "me", "STREAMS", names.JOB_COMMANDS, ">"),
        ("RENAME", names.worker_reports(own), names.JOB_COMMANDS),
        ("COPY", names.worker_reports(own), names.JOB_COMMANDS),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("SWAPDB", "0", "1"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("RANDOMKEY",),
        ("CONFIG", "GET", "requirepass"),
        ("CONFIG", "SET", "requirepass", ""),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "default", "on", "nopass"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("SUBSCRIBE", "c"),
        ("PUBLISH", "c", "m"),
        ("SHUTDOWN", "NOSAVE"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("SAVE",),
        ("MODULE", "LIST"),
    ]


async def test_worker_credential_opens_only_the_workers_own_streams(system: System) -> None:
    attacker, victim = await system.worker(), await system.worker()
    victim.lease_s = 3600.0  # it sends one heartbeat only
    await victim.join()
    await eventually(lambda: _is(system, {victim.id: "joining"}))
    os.kill(system.manager.pid, signal.SIGSTOP)  # it writes to streams and trims them
    has_selectors = int((await client_version(system)).partition(".")[0]) >= 7
    before = {stream: await system.bus.length(stream) for stream in SHARED_STREAMS}
    assert isinstance(attacker.bus, RedisBus)
    client = attacker.bus._redis
    for words in attacks(attacker.id, victim.id, system.id):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*words)
    assert {stream: await system.bus.length(stream) for stream in SHARED_STREAMS} == before
    if has_selectors:
        for words in own_keys_attacks(attacker.id, victim.id):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*words)


def own_keys_attacks(own: str, other: str) -> list[tuple[str, ...]]:
    """Return the commands that Redis 6 cannot forbid."""
    return [
        ("SET", names.worker_reports(own), "no stream"),
        ("SET", names.worker_commands(own), "no stream"),
        ("XADD", names.worker_commands(own), "*", "m", "x"),
        ("SET", names.weight_peer(other), "{}"),
        ("DEL", names.WEIGHT_PEERS),
    ]


async def client_version(system: System) -> str:
    return str((await system.bus.command("INFO", "server"))["redis_version"])


async def _is(system: System, states: dict[str, str]) -> bool:
    found = await system.states()
    return all(found.get(worker) == state for worker, state in states.items())


@pytest.mark.parametrize("site", ["", "eu-west-1"])
async def test_everything_that_a_worker_does_is_allowed(system: System, site: str) -> None:
    worker = await system.worker()
    assert isinstance(worker.bus, RedisBus)
    assert await worker.bus.length(names.worker_reports(worker.id)) == 0
    directory = PeerDirectory(worker.bus, worker.id, "here", site)
    await directory.publish("http://10.0.0.1:80", {})
    assert await directory.peers() == []
    assert await directory.claim("digest")
    await directory.renew_claim("digest")
    await directory.release_claim("digest")
    await directory.withdraw()
    system.run_worker(worker)
    await system.request(groups=2)
    await system.delivered(16)


async def test_frame_of_another_worker_is_dead_lettered_and_changes_nothing(system: System) -> None:
    attacker, victim = await system.worker(), await system.worker()
    await attacker.join()
    system.run_worker(victim, pace_s=0.05)
    await system.request(groups=1, n=4)
    await eventually(lambda: victim.held)
    sample, held = next(iter(victim.held.items()))
    for worker in (victim.id, attacker.id):
        row = (sample, held.attempt, len(held.tokens), 1, victim.version, 1)
        forged = token_frame([row], worker=worker, tokens=[666])
        assert isinstance(attacker.bus, RedisBus)
        await attacker.bus.append(names.worker_reports(attacker.id), forged)
    samples = await system.delivered(4)
    assert {worker for sample in samples for worker, _, _ in sample.spans} == {victim.id}
    letters = [entry.message for entry in await system.bus.read({names.DEAD_LETTERS: START})]
    (letter,) = [letter for letter in letters if isinstance(letter, DeadLetter)]
    assert letter.stream == names.worker_reports(attacker.id)
    assert victim.id in letter.reason


async def test_joined_worker_that_gives_nothing_holds_no_job_up(system: System) -> None:
    """A black hole with a join token: it claims many slots, reports `ready`, renews its lease and sends no frame."""
    system.restart_manager(STALL_LIMIT_S="3")
    hole = await system.worker()
    hole.slots, hole.is_silent = 100_000, True
    hole.leave = hole.flush  # type: ignore[method-assign]  # nor does it drain
    system.run_worker(hole)
    await system.request(groups=8)
    await eventually(lambda: hole.held)
    good = await system.worker()
    system.run_worker(good)
    samples = await system.delivered(64)
    assert {worker for sample in samples for worker, _, _ in sample.spans} == {good.id}
    assert len(hole.held) <= PROBE_SAMPLES
    shown = {one["id"]: one for one in (await system.http.get(f"{system.manager.url}/v1/workers")).json()}
    assert shown[hole.id]["offenses"] >= 1
    drained = await system.http.post(f"{system.manager.url}/v1/workers/{hole.id}/drain")
    assert drained.status_code == 202
    await eventually(lambda: _is(system, {hole.id: "draining", good.id: "ready"}))
    await eventually(lambda: _is(system, {hole.id: "lost", good.id: "ready"}))


async def test_dead_worker_whose_lease_never_ends_holds_no_job_up(system: System) -> None:
    system.restart_manager(STALL_LIMIT_S="3")
    undead = await system.worker()
    undead.is_silent = True
    system.run_worker(undead)
    await system.request(groups=1)
    await eventually(lambda: undead.held)
    system.kill_worker(undead.id)
    assert isinstance(undead.bus, RedisBus)
    await undead.bus.command("SET", names.worker_lease(undead.id), "1")
    system.run_worker(await system.worker())
    await system.delivered(8)
    assert int(await system.bus.command("PTTL", names.worker_lease(undead.id))) > 0


async def test_credential_is_dead_after_the_worker_has_left(system: System) -> None:
    worker = await system.worker()
    await worker.join()
    await eventually(lambda: _is(system, {worker.id: "joining"}))
    await worker.leave()

    async def is_rejected() -> bool:
        try:
            await worker.send_heartbeat()
        except CredentialRejected:
            return True
        except BusUnavailable:
            pass  # disconnected
        return False

    await eventually(is_rejected)

    async def is_forgotten() -> bool:
        return worker.id not in await system.bus.hash_all(names.WORKER_IDENTITIES)

    await eventually(is_forgotten)


async def test_workers_continue_after_redis_has_restarted(system: System) -> None:
    """Redis forgets its users; the manager restores them."""
    worker = await system.worker()
    system.run_worker(worker)
    await system.request(groups=1, max_tokens=40)
    await eventually(lambda: _has_tokens(system))
    system.server.restart()
    samples = await system.delivered(8)
    assert {worker for sample in samples for worker, _, _ in sample.spans} == {worker.id}


async def _has_tokens(system: System) -> bool:
    audit = (await system.http.get(f"{system.manager.url}/v1/jobs/{system.id}/audit")).json()
    return bool(audit["tokens_generated"] > 40)


async def test_manager_refuses_a_redis_that_forbids_users(system: System) -> None:
    await system.bus.command("ACL", "SETUSER", "limited", "on", "nopass", "~*", "&*", "+@all", "-acl")  # all but ACL
    system.manager.kill()
    limited = system.server.url.replace("redis://", "redis://limited:x@")
    manager = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", system.directory, limited, {})
    manager.launch()
    assert manager.wait() == 2
    assert f"or set {SETTING}=off" in manager.log().splitlines()[-1]
    off = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", system.directory, limited, {SETTING: "off"})
    try:
        off.start()
        assert "worker_redis_users_off" in off.log()
        fleet = (await system.http.get(f"{off.url}/v1/fleet")).json()
        assert fleet["worker_redis_users"] == "off"
        joined = await join(off.url, TOKEN, "w", "preemptible")
        assert isinstance(joined.bus, RedisBus)
        assert await joined.bus.length(names.TOKEN_LOG) == 0
        await joined.bus.close()
    finally:
        off.kill()
