"""Fixtures that several kinds of tests use. A fixture that lacks its server skips the test, but fails it in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole run. A test that kills or restarts a server makes its own `RedisServer`."""
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    redis_server.flush()
    return redis_server.url
