"""Ranks that rest send their parts to a real weight store from host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rlboost.services.trainer.adapters.weights import RanksPublisher
from rlboost.services.trainer.ports.engine import PolicyEngine
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache, cached_version
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import digest_of
from rlboost.shared.weights.puller import Puller
from tests.support import rank_policies
from tests.support.losses import clipped_loss
from tests.support.policy_comparison import bits
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.training_rows import rows

pytestmark = pytest.mark.timeout(300)

RATE = 1e-2
LOSS = clipped_loss(0.2, 0.28)
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "torch", "data_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_offloaded_ranks_publish_compare_and_fetch(tmp_path: Path, redis_url: str, layout: str) -> None:
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store")}
    store = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)
    await asyncio.to_thread(store.start)
    model = rank_policies.write(tmp_path / "model", "qwen3-moe" if layout == "ep2" else "qwen3")
    settings: dict[str, Any] = {"dtype": "bfloat16", "offload": "all", **LAYOUTS[layout]}
    try:
        with rank_policies.policy(OptimizerSpec(lr=RATE), **settings) as policy:
            await asyncio.to_thread(policy.load_hf, model)
            client, ours = StoreClient(store.url, TOKEN), dict[str, Any](token=TOKEN)
            publisher = RanksPublisher(client, "job", "{}", tmp_path / "pulled", Waits(), 60.0, deltas=True, **ours)
            versions = []
            for version in range(2):
                await publisher.publish(version, policy.export_shards("base"), expect=version - 1)
                versions.append(bits(policy))
                assert await publisher.equals(version, policy.export_shards("base")) is True
                await asyncio.to_thread(learn, policy)
                assert await publisher.equals(version, policy.export_shards("base")) is False
            assert versions[0] != versions[1]
            policy.load_shards(await publisher.fetch(1))
            assert bits(policy) == versions[1]
            await _lose_and_restore(publisher, policy, tmp_path / "store" / "chunks")
            await publisher.close()
    finally:
        store.kill()


async def test_ranks_publish_an_adapter_that_workers_merge(tmp_path: Path, redis_url: str) -> None:
    """The ranks upload the frozen model, the trainer's own process the adapter."""
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store")}
    store = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)
    await asyncio.to_thread(store.start)
    model = rank_policies.write(tmp_path / "model", "qwen3")
    settings: dict[str, Any] = {"dtype": "bfloat16", "offload": "all", **LAYOUTS["fsdp2"], "lora": LoraSpec(rank=3)}
    client = StoreClient(store.url, TOKEN)
    publisher = RanksPublisher(client, "job", "{}", tmp_path / "pulled", Waits(), 60.0, token=TOKEN)
    pulls = StoreClient(store.url, TOKEN)
    puller = Puller(pulls, Cache(tmp_path / "worker"), Waits(), limit_s=60.0)
    try:
        with rank_policies.policy(OptimizerSpec(lr=RATE), **settings) as policy:
            await asyncio.to_thread(policy.load_hf, model)
            await publisher.publish(0, policy.export_shards("base"), expect=-1)
            await asyncio.to_thread(learn, policy)
            extra: dict[str, Any] = {"base_version": 0, "adapter_json": policy.adapter_json}
            await publisher.publish(1, policy.export_shards("adapter"), expect=0, **extra)
            assert await publisher.equals(0, policy.export_shards("base")) is True
            assert await publisher.equals(1, policy.export_shards("adapter")) is True
            version = cached_version(await puller.pull("job", 1))
            loaded = {name: bytes(value.view(torch.uint8).numpy()) for name, value in version.tensors()}
            assert loaded == dict(bits(policy)) != dict(bits(policy, "base"))
            manifests = [await client.manifest("job", number) for number in range(2)]
            assert [len(manifest.parts) for manifest in manifests] == [2, 1]
            await asyncio.to_thread(learn, policy)
            assert await publisher.equals(1, policy.export_shards("adapter")) is False
    finally:
        await publisher.close()
        puller.close()
        await pulls.close()
        store.kill()


async def _lose_and_restore(publisher: RanksPublisher, policy: PolicyEngine, stored: Path) -> None:
    """Remove every chunk from the store: the ranks upload those of their weights again."""
    manifest = await publisher.client.manifest("job", 1)
    refs = [ref for part in manifest.parts for ref in part.chunks]
    _empty(stored)
    digests = {ref.digest for ref in refs}
    assert await publisher.client.missing(refs) == digests
    shards = policy.export_shards("base")
    found = await asyncio.to_thread(publisher.chunks_among, shards, digests | {digest_of(b"of another job")})
    assert {ref.digest for ref, _ in found} == digests
    await publisher.restore(found)
    assert await publisher.client.missing(refs) == set()


def _empty(folder: Path) -> None:
    for file in folder.glob("*/*"):
        file.unlink()


def learn(policy: PolicyEngine) -> None:
    policy.accumulate([rows()], LOSS)
    policy.step(RATE)
    policy.offload()
