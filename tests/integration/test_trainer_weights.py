"""The trainer's publisher against a real weight store, held to the same promises as its fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rlboost.services.trainer.adapters.weights import StorePublisher
from rlboost.services.trainer.ports.storage import WeightPublisher
from rlboost.shared.errors import Conflict, NotFound
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.trainer_fakes import MemoryWeights


@pytest.fixture
def store(tmp_path: Path, redis_url: str) -> Iterator[ServiceProcess]:
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store"), "RLBOOST_WEIGHT_STORE_KEEP_VERSIONS": "2"}
    process = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)
    process.start()
    yield process
    process.kill()


@pytest.fixture(params=["store", "store with deltas", "fake"])
async def weights(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WeightPublisher]:
    if request.param == "fake":
        yield MemoryWeights()
        return
    store = request.getfixturevalue("store")
    client = StoreClient(store.url, TOKEN)
    deltas = request.param == "store with deltas"
    publisher = StorePublisher(
        client, "job", '{"model_type": "qwen3"}', tmp_path / "pulled", Waits(), 60.0, deltas=deltas
    )
    yield publisher
    await publisher.close()
    assert not (tmp_path / "pulled").exists()


def shards(value: int) -> list[Shard]:
    return [
        Shard("a", "float32", (2,), (0,), (2,), bytes([value] * 8)),
        Shard("b", "float32", (1, 3), (0, 0), (1, 3), bytes([value + 1] * 12)),
    ]


async def test_versions_follow_each_other(weights: WeightPublisher) -> None:
    assert await weights.head() == -1
    await weights.publish(0, shards(0), expect=-1)
    await weights.publish(1, shards(1), expect=0)
    assert await weights.head() == 1


async def test_a_version_comes_back_bit_for_bit(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(5), expect=-1)
    fetched = [shard._replace(data=bytes(shard.data)) for shard in await weights.fetch(0)]
    assert fetched == shards(5)


async def test_commit_with_another_expected_head_is_refused(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(0), expect=-1)
    with pytest.raises(Conflict):
        await weights.publish(2, shards(2), expect=1)
    assert await weights.head() == 0


async def test_committed_tensors_can_be_compared(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(0), expect=-1)
    assert await weights.equals(0, shards(0)) is True
    assert await weights.equals(0, shards(1)) is False
    assert await weights.equals(0, shards(0)[:1]) is False


async def test_digest_is_of_the_committed_tensors_or_of_those_at_hand(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(0), expect=-1)
    committed = await weights.digest(0, shards(1))
    assert committed == await weights.digest(7, shards(0)), "version 7 is not kept"
    assert committed != await weights.digest(7, shards(1))


async def test_an_adapter_is_published_on_the_model_that_it_belongs_to(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(0), expect=-1)
    for version in (1, 2, 3):
        await weights.publish(version, shards(version)[:1], expect=version - 1, base_version=0, adapter_json="{}")
    assert await weights.equals(3, shards(3)[:1]) is True
    fetched = [shard._replace(data=bytes(shard.data)) for shard in await weights.fetch(3)]
    assert fetched == shards(3)[:1]
    assert await weights.equals(0, shards(0)) is True, "it is kept, though only two versions are"


async def test_a_version_that_is_not_kept_cannot_be_compared_or_fetched(weights: WeightPublisher) -> None:
    await weights.publish(0, shards(0), expect=-1)
    assert await weights.equals(7, shards(0)) is None
    with pytest.raises(NotFound):
        await weights.fetch(7)
