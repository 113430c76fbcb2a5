"""A real S3-compatible server (moto's) on a free port, in a process of its own, with one bucket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.ports import reserve_port

_START_LIMIT_S = 30.0
_SERVER = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

moto, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def server(environ, start_response):
    if "HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ:
        with lock:
            return list(moto(environ, start_response))
    return moto(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), server, threaded=True)
"""
"""moto checks a condition and writes in two steps: conditional requests are answered one at a time, as S3 does."""


class S3Server:
    """One server for its whole life; what it holds is in its memory. Its log is `directory/s3.log`."""

    bucket = "weights"

    def __init__(self, directory: Path, *, strict: bool = False) -> None:
        """Nothing runs before `start`; a strict server makes the bucket and then refuses every key that it is shown."""
        self._log = directory / "s3.log"
        self._strict = strict
        self._process: subprocess.Popen[bytes] | None = None
        self.port = reserve_port(self)

    @property
    def env(self) -> dict[str, str]:
        """Return what a client of this server needs in its environment."""
        return self.env_at(f"http://127.0.0.1:{self.port}")

    def env_at(self, endpoint: str) -> dict[str, str]:
        """Return the same where the server is reached by another address."""
        return {
            "AWS_ACCESS_KEY_ID": "key-for-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-for-tests",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }

    def start(self) -> None:
        """Start, and return when the bucket is there."""
        assert self._process is None, "the server runs already"
        env = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "1" if self._strict else "1000000000"}
        command = [sys.executable, "-c", _SERVER, str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        limit = time.monotonic() + _START_LIMIT_S
        while not self._made():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the S3 server did not start:\n{self._log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server, if it runs; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def n_signed_gets(self, folder: str) -> int:
        """Return how many objects of a folder were asked for by signed URLs so far."""
        return len(re.findall(rf"GET /{self.bucket}/{folder}/\S+\?X-Amz-", self._log.read_text()))

    def _made(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{self.bucket}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5.0):
                return True
        except (urllib.error.URLError, OSError):
            return False
