"""What goes with a version when it is published."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlboost.services.trainer.domain.canary_prompts import CanaryPrompts, build_canary_prompts
from rlboost.services.trainer.job.job import DeviceThread
from rlboost.services.trainer.job.publishing import VersionPublisher
from rlboost.shared.weights.manifest import ParityReference, digest_of
from tests.support.trainer_fakes import FakeEngine, MemoryWeights
from tests.support.trainer_rig import Rig

CANARIES = build_canary_prompts(96, temperature=0.8, dtype="bfloat16")


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    device = DeviceThread()
    yield device
    device.close()


async def publishing(
    device: DeviceThread, weights: MemoryWeights, asked: CanaryPrompts | None = CANARIES, *, adapter_json: str = ""
) -> VersionPublisher:
    engine = FakeEngine(adapter_json)
    engine.load_hf(Path("m"))
    job = Rig(Path()).claimed(device)
    job.resources = replace(job.resources, engine=engine, weights=weights, canary_prompts=asked)
    versions = VersionPublisher(job)
    await versions.refresh_head()
    return versions


async def test_published_version_has_a_parity_reference(device: DeviceThread) -> None:
    weights = MemoryWeights()
    versions = await publishing(device, weights)
    await versions.ensure_published(0)
    await versions.publish(1)
    for version in (0, 1):
        canary = ParityReference.decode(weights.parity_references[version])
        assert (canary.temperature, canary.dtype) == (0.8, "bfloat16")
        assert [(row.prompt, row.completion) for row in canary.rows] == list(CANARIES.rows)
        assert {value for row in canary.rows for value in row.logprobs} == {-1.0}


async def test_version_without_canary_prompts_has_no_parity_reference(device: DeviceThread) -> None:
    weights = MemoryWeights()
    await (await publishing(device, weights, None)).ensure_published(0)
    assert weights.parity_references == {0: ""}


async def test_a_committed_version_keeps_the_answer_that_it_was_committed_with(device: DeviceThread) -> None:
    weights = MemoryWeights()
    await (await publishing(device, weights)).ensure_published(0)
    weights.parity_references[0] = "of the first trainer"
    again = await publishing(device, weights)
    await again.ensure_published(0)
    assert weights.parity_references == {0: "of the first trainer"}


async def test_an_adapters_base_is_answered_for_only_where_it_is_served_itself(device: DeviceThread) -> None:
    begun, lost = MemoryWeights(), MemoryWeights()
    await (await publishing(device, begun, adapter_json="{}")).ensure_published(0)
    assert begun.parity_references[0], "an adapter begins as no change"
    await (await publishing(device, lost, adapter_json="{}")).ensure_published(3)
    assert lost.parity_references[0] == ""
    assert lost.parity_references[3]


@pytest.mark.parametrize("adapter_json", ["", "{}"])
async def test_damaged_chunks_are_uploaded_again_from_the_engine(device: DeviceThread, adapter_json: str) -> None:
    weights = MemoryWeights()
    versions = await publishing(device, weights, adapter_json=adapter_json)
    await versions.ensure_published(1)
    others = digest_of(b"of another job")
    lost = [digest_of(b"".join(bytes(shard.data) for shard in shards)) for shards in weights.versions.values()]
    weights.lost = {others, *lost}
    await versions.restore_damaged()
    assert weights.lost == {others}
    weights.lost |= set(lost)
    await versions.restore_damaged()
    assert weights.lost == {others}, "a restored chunk may be damaged again"
