"""A weight store of a benchmark's own, the real process, and its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.redis_server import RedisServer
from tests.support.service_process import ServiceProcess


@contextmanager
def running_store(directory: Path, **settings: str) -> Iterator[tuple[ServiceProcess, str]]:
    """Give a store in `directory` that is ready, and Redis's URL; `settings` are the store's, without their prefix."""
    redis = RedisServer(directory / "redis")
    redis.start()
    env = {f"RLBOOST_WEIGHT_STORE_{name}": value for name, value in settings.items()}
    env["RLBOOST_WEIGHT_STORE_DIR"] = str(directory / "store")
    store = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", directory, redis.url, env, imports=True)
    try:
        store.start()
        yield store, redis.url
    finally:
        store.kill()
        redis.stop()
