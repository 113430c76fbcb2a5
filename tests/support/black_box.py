"""A system driven from outside: through its command line, its REST API, and the streams that anyone may read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

ROOT = Path(__file__).parents[2]
RLBOOST = [sys.executable, "-m", "rlboost"]
UP_LIMIT_S = 180


class Observer:
    """Reads the token log and one job's finished samples while they are there, with nothing of the project's code."""

    def __init__(self, redis_url: str, job_id: str) -> None:
        # Without redis-py's own back-off of seconds: what is trimmed meanwhile would never be seen.
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=5, retry=Retry(NoBackoff(), 0))
        self._streams = {b"rlboost:rollouts.tokens": b"0", f"rlboost:job:{job_id}:rollouts.finished".encode(): b"0"}
        self.flushed: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
        """(sample, worker) -> offset -> token, of every frame that was seen."""
        self._seqs: dict[str, set[int]] = defaultdict(set)
        self.finished: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.admitted: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer")
        self._thread.start()

    def close(self) -> None:
        """Read what is left, and stop."""
        self._stop.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()
            try:
                reply: Any = self._redis.xread(self._streams, count=2000, block=20)  # type: ignore[arg-type]
            except redis.RedisError:
                time.sleep(0.01)
                continue
            for stream, entries in reply or ():
                for entry_id, fields in entries:
                    self._streams[stream] = entry_id
                    self._take(msgpack.unpackb(fields[b"m"]))
            if not reply and stopping:
                return

    def _take(self, body: dict[str, Any]) -> None:
        match body["t"]:
            case "TokenFrame":
                self._take_frame(body)
            case "Admitted":
                request = body["request"]
                self.admitted.update(request["group"] + i for i in range(request["n"]))
            case "SampleFinished" | "SampleDropped":
                self.finished[body["sample"]].append(body)

    def _take_frame(self, body: dict[str, Any]) -> None:
        self._seqs[body["worker"]].add(body["seq"])
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
                self.flushed[sample, body["worker"]][offset + i] = tokens[start + i]
            start += count

    def _saw_every_frame_of(self, worker: str) -> bool:
        """Tell whether none was trimmed before this reader came to it: the numbers of the frames leave no gap."""
        return self._seqs[worker] == set(range(max(self._seqs[worker], default=-1) + 1))

    def check(self) -> int:
        """Assert that each sample came once and that each of its tokens is one that its span's worker flushed."""
        for sample, messages in self.finished.items():
            assert len(messages) == 1, f"sample {sample} was delivered {len(messages)} times"
            (body,) = messages
            assert body["t"] == "SampleFinished", body
            tokens = np.frombuffer(body["tokens"], "<i4").tolist()
            logprobs = np.frombuffer(body["logprobs"], "<f4")
            assert len(logprobs) == len(tokens)
            assert (logprobs <= 0).all()
            assert sum(n for _, _, n in body["spans"]) == len(tokens)
            at = 0
            for worker, _, n in body["spans"]:
                made = self.flushed[sample, worker]
                unseen = {} if self._saw_every_frame_of(worker) else dict(enumerate(tokens))
                assert [made.get(i, unseen.get(i)) for i in range(at, at + n)] == tokens[at : at + n], (
                    f"sample {sample}: {worker} did not flush what its span says"
                )
                at += n
        assert set(self.finished) == self.admitted
        return len(self.finished)


class BlackBox:
    """One `rlboost up` in its own state folder."""

    def __init__(self, state: Path, **options: int) -> None:
        self.state = state
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        line = self.command("up", "--detach", "--json", *flags, limit_s=UP_LIMIT_S)
        ready = json.loads(line)
        self.redis_url: str = ready["redis_url"]
        self.http = httpx.Client(
            base_url=ready["url"], headers={"Authorization": f"Bearer {ready['token']}"}, timeout=10
        )
        self.url, self.token = ready["url"], ready["token"]

    def command(self, *args: str, limit_s: float = 60) -> str:
        """Run `rlboost ARGS` and return what it prints; it must succeed."""
        done = subprocess.run(
            [*RLBOOST, *args, "--state", str(self.state)],
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, f"rlboost {' '.join(args)}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """Return the ends of all logs, for a failure's message."""
        return "".join(
            f"\n--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted((self.state / "logs").glob("*.log"))
        )

    def get(self, path: str, *, within_s: float = 30) -> Any:
        """GET as JSON, for a while again when the manager is away."""
        limit = time.monotonic() + within_s
        while True:
            try:
                answer = self.http.get(path)
                if answer.status_code == 200:
                    return answer.json()
                trouble = answer.text
            except httpx.TransportError as error:
                trouble = repr(error)
            assert time.monotonic() < limit, f"GET {path}: {trouble}"
            time.sleep(0.2)

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 120) -> None:
        """Wait for a condition."""
        limit = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < limit, f"not within {within_s} s: {what}{self.logs()}"
            time.sleep(0.1)

    def submit(self, spec: dict[str, Any]) -> str:
        """Create a job; return its id."""
        answer = self.http.post("/v1/jobs", json=spec)
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """Return the local processes that run."""
        found = json.loads(self.command("ps", "--json"))["processes"]
        return [p for p in found if p["pid"] and (role is None or p["role"] == role)]

    def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of a role."""
        process = self.processes(role)[0]
        os.kill(process["pid"], number)

    def until_step(self, job_id: str, step: int, within_s: float = 180) -> None:
        """Wait until a job has done so many steps."""

        def there() -> bool:
            job = self.get(f"/v1/jobs/{job_id}")
            assert job["state"] not in {"failed", "cancelled"}, f"{job}{self.logs()}"
            return bool(job["step"] >= step)

        self.until(there, f"step {step} of {job_id}", within_s)

    def until_busy(self, job_id: str) -> None:
        """Wait until a step is under way: some of its samples are in flight, with tokens."""
        before = self.get(f"/v1/jobs/{job_id}/audit")["tokens_generated"]

        def busy() -> bool:
            audit = self.get(f"/v1/jobs/{job_id}/audit")
            return bool(audit["in_flight"] and audit["tokens_generated"] > before)

        self.until(busy, "samples in flight")

    def until_completed(self, job_id: str, within_s: float = 300) -> dict[str, Any]:
        """Wait until a job is done; return its record."""

        def ended() -> bool:
            job = self.get(f"/v1/jobs/{job_id}")
            assert job["state"] not in {"failed", "cancelled"}, f"{job}{self.logs()}"
            return bool(job["state"] == "completed")

        self.until(ended, f"{job_id} completed", within_s)
        job: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")
        return job

    def down(self) -> None:
        """Stop everything."""
        self.http.close()
        self.command("down")


@contextmanager
def black_box(state: Path, **options: int) -> Iterator[BlackBox]:
    """A system that is stopped at the end."""
    box = BlackBox(state, **options)
    try:
        yield box
    finally:
        box.down()
