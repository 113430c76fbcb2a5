"""The Redis of a local system on a disk that is slow to force what was written: what it answered outlives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlboost.local import redis_server
from rlboost.local.state import StateDir
from tests.support.ports import reserved_port
from tests.support.redis_server import executable

_SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Only threads beside the main one wait: those that force the file while commands are answered. */
int fdatasync(int file) {
    if (syscall(SYS_gettid) != getpid()) sleep(5);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
"""
WRITING_S = 2.5
"""The first background write is forced after a second; from then on the disk is busy."""
COMPILER = shutil.which("cc")

pytestmark = pytest.mark.skipif(
    (executable() is None or COMPILER is None) and not os.environ.get("CI"), reason="no redis-server or no C compiler"
)


@contextmanager
def running(command: tuple[str, ...], url: str, **environment: str) -> Iterator[redis.Redis]:
    """A server that ends by SIGKILL, and a client that does not try again."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0))
        limit = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < limit, "redis-server did not answer"
                time.sleep(0.02)
        yield client
    finally:
        process.kill()
        process.wait()


def test_redis_killed_on_a_slow_disk_keeps_every_answered_write(tmp_path: Path) -> None:
    source, library = tmp_path / "slow_disk.c", tmp_path / "slow_disk.so"
    source.write_text(_SLOW_DISK)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    state = tmp_path / "state"
    state.mkdir()
    with reserved_port() as port:
        command, url = redis_server.configure(StateDir(state), port)
        with running(command, url, LD_PRELOAD=str(library)) as client:
            until = time.monotonic() + WRITING_S
            while time.monotonic() < until:
                answered = client.incr("writes")
                time.sleep(0.005)
        with running(command, url) as client:
            assert int(client.get("writes") or 0) == answered
