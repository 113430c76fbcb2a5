"""Training and generation around a real weight store, in one process and one order: nothing but the weights differs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from rlboost.services.trainer.adapters.checkpoint_folder import CheckpointFolder
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.weights import StorePublisher
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Data, Prompt, RewardBatch, Scores
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import I32, pack
from tests.support.decoding import decode_as_numbers
from tests.support.engine_manager import EngineManager
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.tiny_models import VOCABULARY
from tests.support.trainer_fakes import FakeRewards
from tests.support.trainer_rig import JOB, Rig, spec

STEPS = 4
_CLOCK = ("time/", "perf/")


@pytest.fixture
def store(tmp_path: Path, redis_url: str) -> Iterator[ServiceProcess]:
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(tmp_path / "store"), "RLBOOST_WEIGHT_STORE_KEEP_VERSIONS": "2"}
    process = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", tmp_path, redis_url, env)
    process.start()
    yield process
    process.kill()


class UnfencedPublisher(StorePublisher):
    """Publishes for a trainer whose lease is in memory, where the store cannot look it up."""

    async def publish(self, *arguments: Any, **options: Any) -> None:
        await super().publish(*arguments, **{**options, "epoch": None})


class Loop(Rig):
    """A trainer with a real policy, checkpoints and publisher, and a real engine for its samples."""

    def __init__(self, folder: Path, url: str, job: JobSpec) -> None:
        super().__init__(folder, job)
        self.path, self.url, self.name = folder, url, folder.name

    def build(self, job: JobSpec, _job_id: str, _created: datetime) -> JobResources:
        model = self.path.parent / "model"
        prompts = [Prompt(f"p{i}", pack([1, 3 + i, 40 - i], I32), {}) for i in range(10)]
        policy = TorchPolicy(
            PolicySettings(optimizer=job.optimizer, dtype=job.trainer.dtype, lora=job.adapter), device="cpu"
        )
        return JobResources(
            engine=policy,
            model=model,
            loss=clipped_loss(0.2, 0.28),
            data=Data(prompts, (), (2,), decode_as_numbers),
            rewards=FakeRewards(_even_tokens),
            checkpoints=CheckpointFolder(self.path / "checkpoints"),
            weights=UnfencedPublisher(
                StoreClient(self.url, TOKEN),
                self.name,
                (model / "config.json").read_text(),
                self.path / "pulled",
                Waits(),
                60.0,
                deltas=job.elastic.weights == "delta",
            ),
            folder=self.folder,
            canary_prompts=build_canary_prompts(VOCABULARY, temperature=1.0, dtype=job.trainer.dtype),
        )

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[EngineManager]:
        async with (
            StoreClient(self.url, TOKEN) as client,
            EngineManager(self.bus, JOB, self.name, client, self.path / "cache") as worker,
        ):
            self.manager = worker  # type: ignore[assignment]  # a rig only runs it
            yield worker

    @property
    def losses(self) -> list[tuple[str, str]]:
        """Every metric but times, as exact text."""
        rows = [self.folder.rows[step] for step in sorted(self.folder.rows)]
        return [
            (name, value.hex()) for row in rows for name, value in sorted(row.items()) if not name.startswith(_CLOCK)
        ]


def _even_tokens(batch: RewardBatch) -> Scores:
    return Scores(tuple(sum(token % 2 == 0 for token in ids) / len(ids) for ids in batch.completion_ids))


def job(weights: str, lr: float, **more: Any) -> RlJob:
    return spec(
        **more,
        steps=STEPS,
        algorithm={"group_size": 3, "updates_per_step": 2},
        sampling={"max_tokens": 12},
        optimizer={"lr": lr},
        elastic={"weights": weights},
        trainer={"checkpoint_every": 2, "micro_batch_tokens": 64, "dtype": "bfloat16"},
    )


async def finished(loop: Loop) -> EngineManager:
    """Run the job to its end, and pull its last version."""
    with capture_logs() as logs:
        async with loop.worker() as worker, loop.trainer():
            await loop.command("create")
            assert (await loop.ended(60.0)).state == "completed"
            await worker.serve(STEPS)
    passed = [line["version"] for line in logs if line["event"] == "parity_check_passed"]
    assert passed == list(range(STEPS + 1)), "every version was scored as the trainer scores it"
    return worker


def tensors(shards: list[Shard]) -> dict[str, torch.Tensor]:
    return {
        shard.name: torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).view(shard.local_shape)
        for shard in shards
    }


async def test_full_and_delta_weights_train_to_the_same_bits(store: ServiceProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    full = Loop(tmp_path / "full", store.url, job("full", lr=1e-4))
    delta = Loop(tmp_path / "delta", store.url, job("delta", lr=1e-4))
    dense, sparse = (await finished(full)).transfers, (await finished(delta)).transfers
    assert len(full.losses) > 10 * STEPS
    assert full.losses == delta.losses
    assert full.folder.model == delta.folder.model
    for version in range(1, STEPS + 1):
        assert dense[version].chunks_delta == sparse[version].chunks_dense == 0
        assert 0 < sparse[version].bytes_delta < dense[version].bytes_dense / 2


async def test_an_adapter_is_trained_published_alone_and_merged_by_the_worker(
    store: ServiceProcess, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    loop = Loop(tmp_path / "adapter", store.url, job("lora", lr=1e-2, lora={"rank": 1}))
    worker = await finished(loop)
    async with StoreClient(store.url, TOKEN) as client:
        manifests = [await client.manifest(loop.name, version) for version in (0, STEPS - 1, STEPS)]
    assert [manifest.base_version for manifest in manifests] == [None, 0, 0]
    assert worker.transfers[0].bytes_dense == manifests[0].n_bytes
    for version in range(1, STEPS + 1):
        assert 0 < worker.transfers[version].bytes_dense < manifests[0].n_bytes / 4
    final, loaded = tensors(loop.folder.model), worker.loaded
    assert all(torch.equal(loaded[name], value.float()) for name, value in final.items())
    base = load_file(tmp_path / "model" / "model.safetensors")
    moved = {name for name, value in final.items() if not torch.equal(value, base[name].bfloat16())}
    assert moved == {name for name in final if name.endswith("proj.weight")}


async def test_killed_adapter_trainer_resumes_from_adapter_and_published_base(
    store: ServiceProcess, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    adapter = job("lora", lr=1e-2, lora={"rank": 1, "dropout": 0.1})
    steady, killed = (Loop(tmp_path / name, store.url, adapter) for name in ("steady", "killed"))
    await finished(steady)
    async with killed.worker() as worker:
        worker.stop_before = STEPS - 1
        async with killed.trainer(killed=True):
            await killed.command("create")
            await killed.waits_for(f"samples of step {STEPS}")
        worker.stop_before = None
        killed.lease_runs_out()
        async with killed.trainer():
            assert (await killed.ended(60.0)).state == "completed"
    assert killed.losses == steady.losses
    assert killed.folder.model == steady.folder.model
    assert killed.folder.adapter == steady.folder.adapter
    assert "weights_restored" not in dict(await killed.events())
