"""Fixtures of the tests about weights. A module whose store differs has a `store` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.puller import Puller
from tests.support.service_process import TOKEN, ServiceProcess


@pytest.fixture
def store(tmp_path: Path, redis_url: str) -> Iterator[ServiceProcess]:
    """A weight store in a process of its own, with its versions below `tmp_path`."""
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store")}
    process = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def client(store: ServiceProcess) -> AsyncIterator[StoreClient]:
    """An open client of the store."""
    async with StoreClient(store.url, TOKEN) as client:
        yield client


@pytest.fixture
def puller(client: StoreClient, tmp_path: Path) -> Iterator[Puller]:
    """A puller with a cache that is empty."""
    puller = Puller(client, Cache(tmp_path / "cache"), Waits(), limit_s=60)
    yield puller
    puller.close()
