"""A Redis and a manager of a benchmark's own, as real processes, and what they use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import httpx
import redis

from rlboost.local import redis_server
from rlboost.local.cluster import Ports
from rlboost.shared.messages.codec import PROTOCOL, PROTOCOL_HEADER

TOKEN = "benchmark"
_START_LIMIT_S = 180.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class System:
    """Redis without persistence (what is measured is the processor, not the disk) and, when started, a manager."""

    def __init__(self, directory: Path) -> None:
        """Start Redis; its log and the manager's go to `directory`."""
        self._directory = directory
        self._ports = Ports()
        port = self._ports.of("redis")
        self.url = f"redis://127.0.0.1:{port}/0"
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        self.redis = self._start("redis", [str(redis_server.find().path), *options, "--dir", str(directory)])
        self.manager: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis.from_url(self.url)
        self._wait_for("redis", self._redis_answers)

    def start_manager(self, module: str = "rlboost.services.rollout_manager", **environment: str) -> int:
        """Start `python -m` a module that is the manager; return its process id when it is ready."""
        port = self._ports.of("manager")
        self.manager_url = f"http://127.0.0.1:{port}"
        self.manager = self._start(
            "manager",
            [sys.executable, "-m", module],
            RLBOOST_REDIS_URL=self.url,
            RLBOOST_TOKEN=TOKEN,
            RLBOOST_MANAGER_PORT=str(port),
            RLBOOST_MANAGER_REDIS_DURABILITY="off",
            OMP_NUM_THREADS="1",
            **environment,
        )
        self._wait_for("manager", lambda: _is_ready(port))
        return self.manager.pid

    def join(self, name: str) -> str:
        """Join a worker of this name; return its id."""
        headers = {"Authorization": f"Bearer {TOKEN}", PROTOCOL_HEADER: str(PROTOCOL)}
        request = {"name": name, "role": "preemptible"}
        answer = httpx.post(f"{self.manager_url}/v1/join", json=request, headers=headers).raise_for_status()
        return str(answer.json()["worker"])

    def stop_manager(self) -> None:
        """End the manager in order.

        Raises:
            RuntimeError: it failed.

        """
        if self.manager is not None:
            self.manager.terminate()
            code = self.manager.wait(_START_LIMIT_S)
            self.manager = None
            if code:
                raise RuntimeError(f"the manager ended with {code}:\n{self.log('manager')[-4000:]}")

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.manager is not None:
            self.manager.kill()
            self.manager.wait()
        self.client.close()
        self.redis.terminate()
        self.redis.wait()
        for name in ("redis", "manager"):
            self._ports.of(name)
            self._ports.release(name)

    def _start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})

    def _wait_for(self, name: str, ready: object) -> None:
        assert callable(ready)
        process = self.redis if name == "redis" else self.manager
        assert process is not None
        limit = time.monotonic() + _START_LIMIT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{name} is not ready:\n{self.log(name)[-4000:]}")
            time.sleep(0.02)

    def _redis_answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.exceptions.ConnectionError:
            return False


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used, all its threads together, to a clock tick (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Return how much memory a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
