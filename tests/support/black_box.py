"""A system driven from outside: its command line, its REST API, its state folder, and streams that anyone may read."""

from __future__ import annotations

import codecs
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgpack
import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlboost.local.state import StateDir
from tests.support.fork_server import ForkedProcess, TestForkServer, fork_server, popen_command

ROOT = Path(__file__).parents[2]
RLBOOST = [sys.executable, "-m", "rlboost"]
UP_LIMIT_S = 180


class Observer:
    """Reads the token log and one job's finished samples, with nothing of the project's code.

    The streams are trimmed, so a busy machine may read them too late. Redis also sends each command that it executes
    (MONITOR) and keeps what is not read yet. It forgets that when it dies, and the streams do not, so both are read.
    """

    def __init__(self, redis_url: str, job_id: str) -> None:
        self._redis = _client(redis_url)
        self._streams = {b"rlboost:rollouts.tokens": b"0", f"rlboost:job:{job_id}:rollouts.finished".encode(): b"0"}
        self._names = tuple(b'"%s"' % stream for stream in self._streams)
        self._job_id = job_id
        self.flushed: dict[tuple[int, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """(sample, worker) -> offset -> tokens, of every frame that was read; several where they were regenerated."""
        self.finished: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.admitted: dict[int, dict[str, Any]] = {}
        """Sample -> its group's request."""
        self._monitored: dict[int, list[dict[str, Any]]] = defaultdict(list)
        """As `finished`, of what was monitored."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, name="observer") for run in (self._monitor, self._run)]
        for thread in self._threads:
            thread.start()

    def move(self, redis_url: str) -> None:
        """Continue with the Redis of a system that was started again."""
        self._redis = _client(redis_url)

    def close(self) -> None:
        """Read what is left, and stop."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._redis.close()
        for sample, bodies in self._monitored.items():
            if len(bodies) > len(self.finished[sample]):
                self.finished[sample] = bodies

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()
            try:
                reply: Any = self._redis.xread(self._streams, count=2000, block=100)  # type: ignore[arg-type]
            except redis.RedisError:
                time.sleep(0.01)
                continue
            for stream, entries in reply or ():
                for entry_id, fields in entries:
                    self._streams[stream] = entry_id
                    self._take(msgpack.unpackb(fields[b"m"]), self.finished)
            if not reply and stopping:
                return

    def _monitor(self) -> None:
        connection = self._redis.connection_pool.make_connection()
        while not self._stop.is_set():
            with suppress(redis.RedisError):
                connection.connect()
                connection.send_command("MONITOR")
                connection.read_response()
                self._read_commands(connection)
            connection.disconnect()
            time.sleep(0.01)

    def _read_commands(self, connection: Any) -> None:
        """Take what is appended to the streams, until the stop and then up to a marker."""
        marker = ""
        while True:
            if self._stop.is_set() and not marker:
                marker = uuid4().hex
                self._redis.echo(marker)
            if not connection.can_read(0.1):
                continue
            line: bytes = connection.read_response()
            if marker and marker.encode() in line:
                return
            # 1718000000.123456 [0 127.0.0.1:5000] "XADD" "stream" "*" "m" "..."
            _, _, command = line.partition(b"] ")
            if command[:7].upper() == b'"XADD" ' and any(name in command[:200] for name in self._names):
                body, _ = codecs.escape_decode(command[command.index(b' "m" "') + 6 : -1])
                self._take(msgpack.unpackb(body), self._monitored)

    def _take(self, body: dict[str, Any], finished: dict[int, list[dict[str, Any]]]) -> None:
        match body["t"]:
            case "TokenFrame":
                self._take_frame(body)
            case "Admitted":
                request = body["request"]
                if request["job_id"] == self._job_id:
                    self.admitted |= {request["group"] + i: request for i in range(request["n"])}
            case "SampleFinished" | "SampleDropped":
                finished[body["sample"]].append(body)

    def _take_frame(self, body: dict[str, Any]) -> None:
        tokens = np.frombuffer(body["tokens"], "<i4").tolist()
        start = 0
        rows = zip(
            np.frombuffer(body["samples"], "<u8").tolist(),
            np.frombuffer(body["offsets"], "<u4").tolist(),
            np.frombuffer(body["counts"], "<u4").tolist(),
            strict=True,
        )
        for sample, offset, count in rows:
            for i in range(count):
                self.flushed[sample, body["worker"]][offset + i].add(tokens[start + i])
            start += count

    def check(self) -> int:
        """Assert that each sample came once, of weights that it may be of, and each token from its span's worker.

        What was trimmed before this reader came to it, as Redis died or before the job was known, cannot be asserted;
        the caller has the number of samples, which is returned, and the audit that of their tokens.
        """
        n_seen = 0
        for sample, messages in self.finished.items():
            assert len(messages) == 1, f"sample {sample} was delivered {len(messages)} times"
            (body,) = messages
            assert body["t"] == "SampleFinished", body
            tokens = np.frombuffer(body["tokens"], "<i4").tolist()
            logprobs = np.frombuffer(body["logprobs"], "<f4")
            assert len(logprobs) == len(tokens)
            assert (logprobs <= 0).all()
            assert sum(n for _, _, n in body["spans"]) == len(tokens)
            at, request = 0, self.admitted.get(sample)
            for worker, version, n in body["spans"]:
                if request:
                    assert request["version"] - request["max_staleness"] <= version <= request["version"]
                made = self.flushed[sample, worker]
                seen = [i for i in range(at, at + n) if i in made]
                assert all(tokens[i] in made[i] for i in seen), (
                    f"sample {sample}: {worker} did not flush what its span says"
                )
                n_seen += len(seen)
                at += n
        assert n_seen, "not one flushed token was seen"
        missing = sorted(set(self.admitted) - set(self.finished))
        assert not missing, f"{len(missing)} samples were not seen delivered: {missing[:8]}"
        return len(self.finished)

    def versions(self) -> list[tuple[int, int]]:
        """Return (step, weight version) of each span of the finished samples."""
        spans = [(sample, span) for sample, bodies in self.finished.items() for span in bodies[0]["spans"]]
        asked = {sample: request["version"] for sample, request in self.admitted.items()}
        return [(asked[sample], version) for sample, (_, version, _) in spans if sample in asked]


def _client(redis_url: str) -> redis.Redis:
    # Without redis-py's own back-off of seconds: what is trimmed meanwhile would never be seen.
    return redis.Redis.from_url(redis_url, socket_timeout=5, retry=Retry(NoBackoff(), 0))


class BlackBox:
    """One `rlboost up` in its own state folder. Its processes are forked, see `forking`, where that is possible."""

    def __init__(self, state: Path, *, standby: bool = False, time_share: bool = False, **options: int | str) -> None:
        self.state = state
        self._flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self._flags += ["--standby"] if standby else []
        self._flags += ["--time-share"] if time_share else []
        self.up()

    def up(self) -> None:
        """Start the system; it continues what an earlier one left in the state folder."""
        env = _environment()
        forks = fork_server(env)
        if forks is None:
            ready = json.loads(self.command("up", "--detach", "--json", *self._flags, limit_s=UP_LIMIT_S))
        else:
            ready = self._up(forks, env, self._flags)
        self.redis_url: str = ready["redis_url"]
        self.url, self.token = ready["url"], ready["token"]
        if hasattr(self, "http"):
            self.http.close()
        self.http: httpx.Client = httpx.Client(headers={"Authorization": f"Bearer {self.token}"}, timeout=10)

    def _up(self, forks: TestForkServer, env: Mapping[str, str], flags: Sequence[str]) -> dict[str, str]:
        log = self.state / "logs" / "supervisor.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        read, write = os.pipe()
        with log.open("ab") as errors:
            arguments = ("up", "--json", *flags, "--state", str(self.state))
            forks.start_module("rlboost", env, *arguments, stdout=write, stderr=errors.fileno(), cwd=ROOT)
        os.close(write)
        with os.fdopen(read) as out:
            line = out.readline()  # each stage of the start has its own limit
        assert line, f"rlboost up {' '.join(flags)}: {self.logs()}"
        ready: dict[str, str] = json.loads(line)
        return ready

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Begin `rlboost ARGS`, what it prints in pipes."""
        return popen_command([*RLBOOST, *args, "--state", str(self.state)], cwd=ROOT, env=_environment())

    def command(self, *args: str, limit_s: float = 180) -> str:
        """Run `rlboost ARGS` and return what it prints; it must succeed."""
        with self.start(*args) as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            finally:
                process.kill()
        assert process.returncode == 0, f"rlboost {' '.join(args)}: {out}{err}{self.logs()}"
        return out

    def logs(self) -> str:
        """Return the ends of all logs, for a failure's message."""
        return "".join(
            f"\n--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted((self.state / "logs").glob("*.log"))
        )

    def get(self, path: str, *, within_s: float = 60) -> Any:
        """GET as JSON from the manager that leads, for a while again when there is none."""
        return self._ask("GET", path, within_s).json()

    def _ask(self, method: str, path: str, within_s: float = 60, **arguments: Any) -> httpx.Response:
        url, limit = self.url + path, time.monotonic() + within_s
        while True:
            try:
                answer = self.http.request(method, url, **arguments)
                if answer.status_code < 300:
                    return answer
                trouble = answer.text
            except httpx.TransportError as error:
                answer, trouble = None, repr(error)
            assert time.monotonic() < limit, f"{method} {url}: {trouble}{self.logs()}"
            if answer is not None and answer.status_code == 307:
                url = answer.headers["Location"]
            else:
                url = self.url + path
                time.sleep(0.2)

    def events(self, job_id: str, *, follow: bool = True) -> list[dict[str, Any]]:
        """Return what happened in a job: until its end, which it waits for, or without `follow` until now."""
        text = self._ask("GET", f"/v1/jobs/{job_id}/events", params={"follow": follow}).text
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]

    def leader(self) -> str:
        """Return the role of the manager that leads."""
        url = str(self._ask("GET", "/v1/fleet").url)
        return "manager" if url.startswith(self.url) else "standby"

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 180, *, every_s: float = 0.1) -> None:
        """Wait for a condition; one that holds for a moment only is asked for more often."""
        limit = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < limit, f"not within {within_s} s: {what}{self.logs()}"
            time.sleep(every_s)

    def submit(self, spec: dict[str, Any]) -> str:
        """Create a job; return its id."""
        headers = {"Idempotency-Key": uuid4().hex}
        job_id: str = self._ask("POST", "/v1/jobs", json=spec, headers=headers).json()["id"]
        return job_id

    def command_job(self, job_id: str, action: str) -> None:
        """Pause, resume or cancel a job."""
        self._ask("POST", f"/v1/jobs/{job_id}/{action}")

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """Return the local processes that run, as `ps` does, only quicker to ask again and again."""
        found = StateDir(self.state).processes()
        return [asdict(p) for p in found if p.alive and role in {None, p.role}]

    def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of a role, once there is one; return when SIGKILL's death is known.

        A second kill would else go to the same process, which is dead and still listed.
        """
        victim = 0

        def sent() -> bool:
            nonlocal victim
            for process in self.processes(role)[:1]:
                victim = process["pid"]
                with suppress(ProcessLookupError):  # it died since it was listed
                    os.kill(victim, number)
                    return True
            return False

        self.until(sent, f"a process of the role {role} lives")
        if number == signal.SIGKILL:
            self.until(lambda: victim not in {p["pid"] for p in self.processes(role)}, f"{role} is known to be dead")

    def kill_trainer_of(self, job_id: str) -> None:
        """Kill the process that trains a job."""
        with redis.Redis.from_url(self.redis_url) as client:
            name: Any = client.hget("rlboost:jobs.trainers", job_id)
        pids = {process["name"]: process["pid"] for process in self.processes("trainer")}
        os.kill(pids[name.decode()], signal.SIGKILL)

    def until_step(self, job_id: str, step: int, within_s: float = 180) -> None:
        """Wait until a job has done so many steps."""

        def there() -> bool:
            job = self.get(f"/v1/jobs/{job_id}")
            assert job["state"] not in {"failed", "cancelled"}, f"{job}{self.logs()}"
            return bool(job["step"] >= step)

        self.until(there, f"step {step} of {job_id}", within_s)

    def until_busy(self, job_id: str) -> bool:
        """Wait until a step is under way: samples are in flight, and tokens are made; False: the job is completed."""
        before = self.get(f"/v1/jobs/{job_id}/audit")["tokens_generated"]
        completed = False

        def busy() -> bool:
            nonlocal completed
            completed = self._is_completed(job_id)
            audit = self.get(f"/v1/jobs/{job_id}/audit")
            return completed or bool(audit["in_flight"] and audit["tokens_generated"] > before)

        self.until(busy, "samples in flight", every_s=0.01)
        return not completed

    def until_spot_ready(self, n_workers: int) -> None:
        """Wait until there are so many spot workers, each ready."""

        def ready() -> bool:
            states = [worker["state"] for worker in self.get("/v1/workers") if worker["role"] == "preemptible"]
            return states == ["ready"] * n_workers

        self.until(ready, "all spot workers are ready")

    @contextmanager
    def begun_on_spot(self, spec: dict[str, Any], n_workers: int) -> Iterator[tuple[str, Observer]]:
        """Create a job that begins once so many spot workers are ready; yield its id and its observer.

        The reserved workers may else be done with a short job before these have joined.
        """
        job_id = self.submit(spec)
        self.command_job(job_id, "pause")
        with closing(Observer(self.redis_url, job_id)) as observer:
            self.until_spot_ready(n_workers)
            self.command_job(job_id, "resume")
            yield job_id, observer

    def until_completed(self, job_id: str, within_s: float = 300) -> dict[str, Any]:
        """Wait until a job is done; return its record."""
        self.until(lambda: self._is_completed(job_id), f"{job_id} completed", within_s)
        job: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")
        return job

    def _is_completed(self, job_id: str) -> bool:
        job = self.get(f"/v1/jobs/{job_id}")
        assert job["state"] not in {"failed", "cancelled"}, f"{job}{self.logs()}"
        return bool(job["state"] == "completed")

    def down(self) -> None:
        """Stop everything."""
        self.http.close()
        log = self.state / "logs" / "down.log"
        process = start_forked("down", "--state", str(self.state), log=log)
        try:
            assert process.wait(180) == 0, f"rlboost down: {self.logs()}"
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start_forked(*args: str, log: Path) -> ForkedProcess | subprocess.Popen[bytes]:
    """Begin `rlboost ARGS` without its imports where that is possible, see `forking`; `log` gets what it prints."""
    env = _environment()
    forks = fork_server(env)
    with log.open("wb") as out:
        if forks is None:
            return subprocess.Popen([*RLBOOST, *args], cwd=ROOT, env=env, stdout=out, stderr=out)
        return forks.start_module("rlboost", env, *args, stdout=out.fileno(), stderr=out.fileno(), cwd=ROOT)


@contextmanager
def black_box(
    state: Path, *, standby: bool = False, time_share: bool = False, **options: int | str
) -> Iterator[BlackBox]:
    """A system that is stopped at the end."""
    box = BlackBox(state, standby=standby, time_share=time_share, **options)
    try:
        yield box
    finally:
        box.down()


def check_engine_and_trainer_agree(box: BlackBox, spec: dict[str, Any]) -> None:
    """Run a job, kill a worker in its second step, and check that its engines and its trainer compute the same."""
    job_id = box.submit(spec)
    box.until_step(job_id, 1)
    assert box.until_busy(job_id)
    box.kill("preemptible")
    box.until_completed(job_id, within_s=600)
    metrics = box.get(f"/v1/jobs/{job_id}/metrics")
    audit = box.get(f"/v1/jobs/{job_id}/audit")
    per_step = spec["data"]["prompts_per_step"] * spec["algorithm"]["group_size"]
    assert audit["requested"] == audit["delivered"] == spec["steps"] * per_step
    assert not audit["dropped"]
    differences = [row["off_policy/abs_log_ratio"] for row in metrics if "off_policy/abs_log_ratio" in row]
    assert len(differences) == spec["steps"]
    assert max(differences) < 1e-4
