"""A service of ours as a real process on a free port, to be killed and restarted by tests."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.support.eventually import LIMIT_S
from tests.support.fork_server import ForkedProcess, fork_server
from tests.support.ports import reserve_port

TOKEN = "a-token-for-tests"


class ServiceProcess:
    """`services.NAME` on one port for its whole life; its log is `directory/NAME.log`.

    It is forked from a process that has imported what it needs, see `forking`, unless it is to import that itself.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        directory: Path,
        redis_url: str,
        env: Mapping[str, str],
        module: str = "",
        *,
        imports: bool = False,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            name: the service's package.
            prefix: its settings' prefix.
            directory: where its log goes.
            redis_url: its broker.
            env: more settings.
            module: run in place of the service's own.
            imports: it starts as `python -m` does, for tests of what happens meanwhile.

        """
        self.port = reserve_port(self)
        tls = bool(env.get("RLBOOST_TLS_CERT"))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._trust = ssl.create_default_context(cafile=env["RLBOOST_TLS_CA"]) if tls else None
        self._module = module or f"rlboost.services.{name}"
        self._log = directory / f"{name}.log"
        common = {"RLBOOST_REDIS_URL": redis_url, "RLBOOST_TOKEN": TOKEN, f"{prefix}PORT": str(self.port)}
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", **common, **env}
        self._forks = None if imports else fork_server(self.env)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        """Return the running process's id."""
        assert self._process is not None, "the service does not run"
        return self._process.pid

    def launch(self) -> None:
        """Start the process without waiting for it."""
        assert self._process is None, "the service runs already"
        with self._log.open("ab") as log:
            if self._forks is not None and self._forks.fits(self.env):
                self._process = self._forks.start_module(self._module, self.env, stderr=log.fileno())
            else:
                self._process = subprocess.Popen([sys.executable, "-m", self._module], env=self.env, stderr=log)

    def start(self) -> None:
        """Start, and return when it is ready."""
        self.launch()
        self.until_ready()

    def until_ready(self) -> None:
        """Return when the running process is ready."""
        assert self._process is not None
        limit = time.monotonic() + LIMIT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{self._module} is not ready:\n{self.log()}")
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End in order with a signal; return the exit code."""
        assert self._process is not None, "the service does not run"
        self._process.send_signal(number)
        return self._ended()

    def kill(self) -> None:
        """End with SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def wait(self) -> int:
        """Wait until it ends by itself; return the exit code."""
        assert self._process is not None, "the service does not run"
        return self._ended()

    def log(self) -> str:
        """Return all that it has logged."""
        return self._log.read_text()

    def _ended(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(LIMIT_S)
        finally:
            self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2.0, context=self._trust):
                return True
        except (urllib.error.URLError, OSError):
            return False
