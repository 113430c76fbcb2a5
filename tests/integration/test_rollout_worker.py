"""The real worker process with the torch engine, a real Redis and the real weight store; the manager is a script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_RELEASED,
    Dismissed,
    Drain,
    Event,
    PreemptionNotice,
    Resume,
    Suspend,
    TokenFrame,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams.bus import Entry, position
from rlboost.shared.streams.names import WORKER_HEARTBEATS, job_events, weight_peer
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.rest_models import NONCE_FILE
from rlboost.shared.wire import U64, ints
from tests.support import published_model, tiny_models
from tests.support.eventually import eventually
from tests.support.fake_metadata import FakeMetadata
from tests.support.hanging_worker import HANGS_AFTER_TOKENS
from tests.support.ports import reserved_port
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.stopwatch import Stopwatch
from tests.support.worker_manager import JOB, JoinServer, WorkerManager, assign, release

LONG = 8000
"""More tokens than a test waits for."""
MISLABELLED, DEEPER, WIDE = "mislabelled", "deeper", "wide"
"""Jobs: one whose weights are not what their digests say, one with another model, and one of 51 MB."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A weight store with two versions of `JOB`."""
    directory = tmp_path_factory.mktemp("store")
    redis = RedisServer(directory / "redis")
    redis.start()
    settings = {"RLBOOST_WEIGHT_STORE_DIR": str(directory / "weights")}
    service = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", directory, redis.url, settings)
    try:
        service.start()
        # Without it the workers are on other machines, as far as they know.
        (directory / "weights" / NONCE_FILE).unlink()
        asyncio.run(_publish(service.url))
        yield service
    finally:
        service.kill()
        redis.stop()


async def _publish(url: str) -> None:
    async with StoreClient(url, TOKEN) as client:
        await published_model.publish(client, JOB, 0, seed=0)
        await published_model.publish(client, JOB, 1, seed=1)
        await published_model.publish(client, DEEPER, 0, seed=2, layers=3)
        await published_model.publish_mislabelled(client, MISLABELLED)
        await published_model.publish(client, WIDE, 0, seed=3, vocabulary=400_000)


class Site:
    """A Redis, a join route, and the workers that were hired here."""

    def __init__(self, directory: Path, store_url: str) -> None:
        self._directory = directory
        self._hired: list[ServiceProcess] = []
        self.redis = RedisServer(directory / "redis", aof=True)
        self.redis.start()
        self.join = JoinServer(TOKEN, self.redis.url, store_url)

    def hire(self, module: str = "", *, imports: bool = False, **settings: str) -> ServiceProcess:
        """Start a worker, or what `module` makes of one; see `ServiceProcess` for `imports`."""
        folder = self._directory / f"w{len(self._hired)}"
        folder.mkdir()
        defaults = {"URL": self.join.url, "NAME": folder.name, "SLOTS": "8", "CACHE_DIR": str(folder / "cache")}
        env = {f"RLBOOST_WORKER_{key}": value for key, value in (defaults | settings).items()}
        # A Redis URL that nobody answers: a worker has it from the manager.
        nobody = "redis://127.0.0.1:1/0"
        worker = ServiceProcess("rollout_worker", "RLBOOST_WORKER_", folder, nobody, env, module, imports=imports)
        worker.launch()
        self._hired.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._hired:
            worker.kill()
        self.join.close()
        self.redis.stop()


@contextmanager
def closing(site: Site) -> Iterator[Site]:
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
def site(store: ServiceProcess, tmp_path: Path) -> Iterator[Site]:
    """A site of the test's own."""
    with closing(Site(tmp_path, store.url)) as site:
        yield site


@pytest.fixture
async def manager(site: Site) -> AsyncIterator[WorkerManager]:
    """The manager of the test's own site."""
    bus = RedisBus(site.redis.url)
    yield WorkerManager(bus)
    await bus.close()


@pytest.fixture(scope="module")
def shared_site(store: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with one worker, `resident`, for tests that do it no harm: its start takes seconds of CPU."""
    with closing(Site(tmp_path_factory.mktemp("shared"), store.url)) as site:
        yield site


@pytest.fixture(scope="module")
def resident(shared_site: Site) -> ServiceProcess:
    return shared_site.hire()


@pytest.fixture
async def boss(shared_site: Site, resident: ServiceProcess) -> AsyncIterator[WorkerManager]:
    """The manager of the shared site."""
    bus = RedisBus(shared_site.redis.url)
    yield WorkerManager(bus)
    await bus.close()


@pytest.fixture
async def worker(boss: WorkerManager) -> str:
    """The resident worker's incarnation, serving version 0 of `JOB`."""
    await boss.joined()
    newest = (await boss.received(WorkerJoined))[-1].worker
    await boss.send(newest, UseVersion(job_id=JOB, version=0))
    await until_serves(boss, newest, JOB)
    return newest


async def until_serves(boss: WorkerManager, worker: str, job_id: str) -> None:
    """Wait until a worker serves version 0 of a job."""

    async def serves() -> bool:
        beat = await boss.last_heartbeat(worker)
        return (beat.state, beat.job_id, beat.version) == ("ready", job_id, 0)

    await eventually(serves)


async def stop(worker: ServiceProcess, number: int = signal.SIGTERM) -> tuple[int, float]:
    """Send a signal; return the exit code and the seconds it took."""
    stopwatch = Stopwatch()
    code = await asyncio.to_thread(worker.stop, number)
    return code, stopwatch.read()


async def metric(worker: ServiceProcess, name: str) -> float:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        text = (await client.get(f"{worker.url}/metrics")).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in {text}"
    return float(found[1])


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def ms(entry: Entry) -> int:
    """Return Redis's time of an entry, in milliseconds."""
    return position(entry.id)[0]


# --- with the shared worker -------------------------------------------------------------------------------------------


async def test_a_worker_joins_pulls_becomes_ready_and_generates(boss: WorkerManager, worker: str) -> None:
    beats = await boss.received(WorkerHeartbeat, worker)
    assert [beat.update_s > beat.update_pause_s > 0 for beat in beats] == [beat.version >= 0 for beat in beats]
    states = list(dict.fromkeys(beat.state for beat in beats))
    assert states == ["joining", "pulling", "ready"]
    await boss.send(worker, assign(1, 2, 3, max_tokens=60))
    made = await boss.until_finished((1, 1), (2, 1), (3, 1))
    for row in (made[i, 1] for i in (1, 2, 3)):
        assert (row.first_offset, len(row.tokens), row.finish) == (0, 60, FINISH_LENGTH)
        assert set(row.versions) == {0}
        assert all(logprob < 0 for logprob in row.logprobs)
    frames = [e.message for e in await boss.log() if isinstance(e.message, TokenFrame) and e.message.worker == worker]
    assert [frame.seq for frame in frames] == list(range(len(frames)))


async def test_released_sample_migrates_without_lost_or_regenerated_tokens(boss: WorkerManager, worker: str) -> None:
    await boss.send(worker, assign(70, max_tokens=400))
    whole = (await boss.until_finished((70, 1)))[70, 1].tokens
    await boss.send(worker, assign(70, 71, attempt=2, max_tokens=400))
    await boss.until_generated((70, 2), tokens=10)
    await boss.send(worker, release((70, 2), (71, 1)))
    part = (await boss.until_finished((70, 2)))[70, 2]
    assert part.finish == FINISH_RELEASED
    assert len(part.tokens) < 400
    await boss.send(worker, assign(70, attempt=3, max_tokens=400, tokens=part.tokens))
    made = await boss.until_finished((70, 3), (71, 2))
    assert part.tokens + made[70, 3].tokens == whole
    assert made[71, 2].finish == FINISH_LENGTH, "a release of another attempt is passed over"


async def test_sample_across_versions_has_logprobs_of_each_tokens_weights(boss: WorkerManager, worker: str) -> None:
    await boss.send(worker, assign(80, max_tokens=2000))
    await boss.until_generated((80, 1), tokens=20)
    await boss.send(worker, UseVersion(job_id=JOB, version=1), assign(81, version=1, max_tokens=20))
    row = (await boss.until_finished((81, 1), (80, 1)))[80, 1]
    n = row.versions.index(1)
    assert 20 <= n < 2000
    assert row.versions == [0] * n + [1] * (2000 - n)
    # Plain forward passes over the whole sample: each version's logprobs of its own tokens, given all before them.
    for version, part in ((0, slice(0, n)), (1, slice(n, 2000))):
        model = tiny_models.make(published_model.config(layers=2), seed=version)
        expected = tiny_models.logprobs(model, [1, 2, 3], row.tokens)
        assert row.logprobs[part] == pytest.approx(expected[part], abs=1e-4)


async def test_another_jobs_model_replaces_the_engine_after_the_release(boss: WorkerManager, worker: str) -> None:
    await boss.send(worker, assign(90, 91, max_tokens=LONG))
    await boss.until_generated((90, 1), (91, 1), tokens=20)
    await boss.send(worker, UseVersion(job_id=DEEPER, version=0))
    made = await boss.until_finished((90, 1), (91, 1))
    assert [made[key].finish for key in ((90, 1), (91, 1))] == [FINISH_RELEASED] * 2

    await until_serves(boss, worker, DEEPER)


async def test_version_missing_in_the_store_is_reported_and_not_served(boss: WorkerManager, worker: str) -> None:
    await boss.send(worker, UseVersion(job_id=JOB, version=99))

    async def reported() -> bool:
        events = [entry.message for entry in await boss.entries(job_events(JOB))]
        return any(isinstance(e, Event) and e.fields.get("version") == 99 for e in events)

    await eventually(reported)
    await boss.until(worker, "ready", 0)


async def test_suspended_worker_has_every_token_in_the_log(
    boss: WorkerManager, worker: str, resident: ServiceProcess
) -> None:
    async def suspend() -> tuple[float, int]:
        """Return how many tokens the engine has made and how many the log has, when the beat says "suspended"."""
        await boss.send(worker, Suspend(step=1))
        beat = await boss.until(worker, "suspended")
        assert (beat.running, beat.pending) == (0, 0)
        logged = sum(len(row.tokens) for row in (await boss.generated()).values())
        return await metric(resident, "rlboost_worker_tokens_total"), logged

    before = await suspend()
    await boss.send(worker, Resume(step=2), assign(*range(40, 52), max_tokens=LONG))
    await boss.until_generated(*((i, 1) for i in range(40, 48)), tokens=20)
    after = await suspend()
    assert after[0] - before[0] == after[1] - before[1] >= 8 * 20
    await boss.send(worker, Resume(step=2), assign(52, max_tokens=5))
    made = await boss.until_finished((52, 1))
    assert sum(len(row.tokens) for row in made.values()) == after[1] + 5


async def test_health_and_metrics_report_the_worker_state(
    boss: WorkerManager, worker: str, resident: ServiceProcess
) -> None:
    await boss.send(worker, assign(53, max_tokens=4))
    await boss.until_finished((53, 1))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{resident.url}/healthz")).status_code == 200
        assert (await client.get(f"{resident.url}/readyz")).json()["ready"] is True
        assert (await client.get(f"{resident.url}/metrics")).status_code == 401
    assert await metric(resident, "rlboost_worker_weight_version") == 0
    assert await metric(resident, 'rlboost_worker_state{state="ready"}') == 1
    assert await metric(resident, "rlboost_worker_flush_seconds_count") > 0
    assert await metric(resident, "rlboost_worker_resident_bytes") > 10e6


async def test_a_dismissed_worker_becomes_another_incarnation_without_a_pull(boss: WorkerManager, worker: str) -> None:
    await boss.send(worker, assign(60, max_tokens=LONG))
    await boss.until_generated((60, 1), tokens=10)
    await boss.send(worker, Dismissed(reason="declared lost"))

    async def newest() -> str:
        joined = [m.worker for m in await boss.received(WorkerJoined)]
        return joined[-1] if joined[-1] != worker else ""

    again = await eventually(newest)
    await boss.send(again, UseVersion(job_id=JOB, version=0), assign(61, max_tokens=10))
    made = await boss.until_finished((61, 1))
    frames = [e.message for e in await boss.log() if isinstance(e.message, TokenFrame)]
    assert frames[-1].worker == again
    assert made[60, 1].finish == 0
    assert [beat.state for beat in await boss.received(WorkerHeartbeat, again)][:1] == ["joining"]


# --- with a worker that ends ------------------------------------------------------------------------------------------


async def test_worker_announces_its_site(site: Site, manager: WorkerManager) -> None:
    site.hire(SITE="office")
    worker = await manager.ready_worker()
    (lease,) = await manager.bus.lease_values([weight_peer(worker)])
    assert lease is not None
    assert json.loads(lease)["site"] == "office"


async def test_sigterm_hands_off_everything_within_seconds(site: Site, manager: WorkerManager) -> None:
    process = site.hire()
    worker = await manager.ready_worker()
    await manager.send(worker, assign(*range(8), max_tokens=LONG))
    await manager.until_generated(*((i, 1) for i in range(8)), tokens=50)
    code, took_s = await stop(process)
    assert code == 0
    assert took_s < 5.0
    (notice,), (left,) = await manager.received(PreemptionNotice), await manager.received(WorkerLeft)
    assert (notice.reason, notice.lead_s, left.worker) == ("sigterm", 10.0, worker)
    words = await manager.entries(WORKER_HEARTBEATS)
    assert isinstance(words[-1].message, WorkerLeft)
    log = await manager.log()
    assert ms(log[-1]) <= ms(words[-1])
    noticed_at = next(ms(entry) for entry in words if isinstance(entry.message, PreemptionNotice))
    assert ms(log[-1]) >= noticed_at, "what was made until the engine stopped was flushed after the notice"
    await manager.generated()


async def test_a_spot_notice_hands_off_64_samples_with_every_token_made(
    site: Site, manager: WorkerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeMetadata("aws")
    with reserved_port() as proxy, contextlib.closing(cloud):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        process = site.hire(SLOTS="64", NOTICES="auto", METADATA_URL=f"http://localhost:{cloud.port}")
        worker = await manager.ready_worker()
        await manager.send(worker, assign(*range(64), max_tokens=LONG))
        await manager.until_generated(*((i, 1) for i in range(64)), tokens=5)
        cloud.preempt(lead_s=30.0)
        assert await asyncio.to_thread(process.wait) == 0
    (notice,), (left,) = await manager.received(PreemptionNotice), await manager.received(WorkerLeft)
    assert (notice.reason, left.worker) == ("aws: terminate", worker)
    assert notice.lead_s == pytest.approx(29.0, abs=4.0)
    times = {type(entry.message): ms(entry) for entry in await manager.entries(WORKER_HEARTBEATS)}
    assert times[WorkerLeft] - times[PreemptionNotice] < 2000
    log = [json.loads(line) for line in process.log().splitlines() if line.startswith("{")]
    (line,) = [line for line in log if line["event"] == "handed_off"]
    made = sum(len(row.tokens) for row in (await manager.generated()).values())
    assert (line["samples"], line["tokens_generated"]) == (64, made), "whoever goes on makes none of them again"


async def test_notice_route_requires_the_token(resident: ServiceProcess, worker: str) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{resident.url}/v1/notice", json={"lead_s": 1})).status_code == 401


async def test_a_drained_worker_hands_off_and_exits_with_0(site: Site, manager: WorkerManager) -> None:
    process = site.hire()
    worker = await manager.ready_worker()
    await manager.send(worker, assign(1, max_tokens=LONG))
    await manager.until_generated((1, 1), tokens=10)
    await manager.send(worker, Drain(reason="scaled down"))
    assert await asyncio.to_thread(process.wait) == 0
    (left,) = await manager.received(WorkerLeft)
    assert left.reason == "scaled down"
    assert await manager.received(PreemptionNotice) == []


async def test_sigint_is_reported_as_the_reason(site: Site, manager: WorkerManager) -> None:
    process = site.hire()
    await manager.ready_worker()
    code, _ = await stop(process, signal.SIGINT)
    assert code == 0
    (notice,), (left,) = await manager.received(PreemptionNotice), await manager.received(WorkerLeft)
    assert (notice.reason, left.reason) == ("sigint", "sigint")


async def test_sigterm_while_libraries_load_is_quick(site: Site, manager: WorkerManager) -> None:
    process = site.hire(imports=True)
    worker = await manager.joined()
    await manager.send(worker, UseVersion(job_id=JOB, version=0))
    await manager.until(worker, "pulling")
    code, took_s = await stop(process)
    assert (code, len(await manager.received(WorkerLeft))) == (0, 1)
    assert took_s < 5.0
    assert all(beat.version == -1 for beat in await manager.received(WorkerHeartbeat))


async def test_sigterm_during_a_pull_that_hangs_is_quick(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(Site(tmp_path, url_of(silent))) as site:
        process, bus = site.hire(), RedisBus(site.redis.url)
        manager = WorkerManager(bus)
        worker = await manager.joined()
        await manager.send(worker, UseVersion(job_id=JOB, version=0))
        await manager.until(worker, "pulling")
        beats = len(await manager.received(WorkerHeartbeat))

        async def more_beats() -> bool:
            return len(await manager.received(WorkerHeartbeat)) > beats + 3

        await eventually(more_beats)
        code, took_s = await stop(process)
        assert (code, len(await manager.received(WorkerLeft))) == (0, 1)
        assert took_s < 5.0
        await bus.close()


async def test_sigterm_before_a_manager_answers_ends_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {"RLBOOST_WORKER_URL": url_of(silent), "RLBOOST_WORKER_CACHE_DIR": str(tmp_path)}
        process = ServiceProcess("rollout_worker", "RLBOOST_WORKER_", tmp_path, "redis://127.0.0.1:1/0", settings)
        process.launch()
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            code, took_s = await stop(process)
    assert code == 0
    assert took_s < 5.0


async def test_sigkill_loses_no_more_than_a_flush_interval(site: Site, manager: WorkerManager) -> None:
    process = site.hire(FLUSH_INTERVAL_S="0.2")
    began, watch = time.monotonic(), Stopwatch()
    worker = await manager.ready_worker()
    await manager.send(worker, assign(1, 2, max_tokens=LONG))
    await manager.until_generated((1, 1), (2, 1), tokens=50)

    async def some_frames() -> bool:
        return len(await manager.log()) >= 3

    await eventually(some_frames)
    killed_at = time.time()
    process.kill()
    log = await manager.log()
    busy_s = 0.8 + time.monotonic() - began - watch.read()  # a busy machine's part in it
    assert killed_at - ms(log[-1]) / 1000 < 0.2 + busy_s
    gaps = [ms(after) - ms(before) for before, after in itertools.pairwise(log)]
    assert max(gaps) < 1000 * (0.2 + busy_s)
    assert await manager.received(WorkerLeft) == []
    await manager.generated()


async def test_a_redis_that_restarts_finds_every_token_in_order(site: Site, manager: WorkerManager) -> None:
    process = site.hire()
    worker = await manager.ready_worker()
    await manager.send(worker, assign(1, 2, 3, max_tokens=1000))
    await manager.until_generated((1, 1), tokens=100)
    site.redis.kill()

    async def made_without_a_broker() -> bool:
        return await metric(process, "rlboost_worker_unsent_bytes") > 100 * 8

    await eventually(made_without_a_broker)
    site.redis.start()
    bus = RedisBus(site.redis.url)
    again = WorkerManager(bus)
    made = await again.until_finished((1, 1), (2, 1), (3, 1))
    assert [len(made[i, 1].tokens) for i in (1, 2, 3)] == [1000, 1000, 1000]
    assert len(await again.received(WorkerJoined)) == 1
    await again.until(worker, "ready", 0)
    await bus.close()


async def test_weights_that_differ_from_the_published_are_never_served(site: Site, manager: WorkerManager) -> None:
    process = site.hire()
    worker = await manager.joined()
    await manager.send(worker, UseVersion(job_id=MISLABELLED, version=0))
    assert await asyncio.to_thread(process.wait) == 1
    assert {beat.state for beat in await manager.received(WorkerHeartbeat)} <= {"joining", "pulling"}
    assert {beat.version for beat in await manager.received(WorkerHeartbeat)} == {-1}
    log = [json.loads(line) for line in process.log().splitlines() if line.startswith("{")]
    assert len([line for line in log if line["event"] == "loaded_weights_differ"]) == 2
    assert "are not what was published" in process.log().splitlines()[-1]
    (left,) = await manager.received(WorkerLeft)
    assert "are not what was published" in left.reason


async def test_hung_engine_ends_the_worker_with_every_token_in_the_log(site: Site, manager: WorkerManager) -> None:
    process = site.hire("tests.support.hanging_worker", STALL_LIMIT_S="3")
    worker = await manager.ready_worker()
    await manager.send(worker, assign(1, 2, max_tokens=LONG))
    assert await asyncio.to_thread(process.wait) == 1
    (left,) = await manager.received(WorkerLeft)
    assert "the inference engine hangs" in left.reason
    assert ints(left.running_at_failure, U64) == [1, 2]
    made = await manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == HANGS_AFTER_TOKENS
    (start,) = [json.loads(line) for line in process.log().splitlines() if "first_token" in line]
    laps = [start[f"{lap}_s"] for lap in ("import", "join", "version", "pull", "load", "parity", "assignment", "step")]
    assert sum(laps) == pytest.approx(start["after_s"], abs=0.01)
    assert start["import_s"] > 0
    (hung,) = [json.loads(line) for line in process.log().splitlines() if "engine_hung" in line]
    assert "_round_or_hang" in str(hung["stacks"]), "the log shows where the engine stands"


async def test_wrong_token_is_one_error_line_and_exit_code_2(site: Site) -> None:
    process = site.hire(TOKEN="of-another-system")
    assert await asyncio.to_thread(process.wait) == 2
    (line,) = process.log().splitlines()
    assert line.startswith("rollout_worker: wrong token for the manager at")
    assert "RLBOOST_TOKEN" in line


# --- weights from each other ------------------------------------------------------------------------------------------


async def test_missing_device_ends_an_idle_worker(site: Site, manager: WorkerManager) -> None:
    process = site.hire(DEVICE="cuda:99")
    worker = await manager.joined()
    assert await asyncio.to_thread(process.wait) == 2
    last = process.log().splitlines()[-1]
    assert "RLBOOST_WORKER_DEVICE: device 'cuda:99' cannot be used (available: cpu" in last
    (left,) = await manager.received(WorkerLeft, worker)
    assert "cuda:99" in left.reason


async def test_a_worker_gets_its_weights_from_another_worker(site: Site, manager: WorkerManager) -> None:
    first = site.hire()
    one = await manager.joined()
    await manager.send(one, UseVersion(job_id=WIDE, version=0))
    await until_serves(manager, one, WIDE)
    second = site.hire()
    two = await manager.joined(nth=2)
    await manager.send(two, UseVersion(job_id=WIDE, version=0))
    await until_serves(manager, two, WIDE)
    (pull,) = [json.loads(line) for line in second.log().splitlines() if "weights_pulled" in line]
    assert pull["from_peers"] == pull["bytes_dense"] == await metric(first, "rlboost_worker_weights_sent_bytes_total")
    assert pull["from_store"] == 0
