"""Adapters of several jobs on the weights of one engine: what a new version loads, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.ports import Changes, StagedWeights
from rlboost.shared.errors import UnsuitableWeights
from tests.support.engines import request
from tests.support.worker_fakes import FakeEngine, FakeEngineFactory, FakeStagedWeights

MODEL = {"a": 1}


class Engine(FakeEngine):
    """Counts the loads of a model's weights."""

    loads = 0

    def __init__(self, max_adapters: int = 8) -> None:
        super().__init__(slots=4, max_adapters=max_adapters)
        self.adapter_refusals = {99: "its rank 99 is above 64"}

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        self.loads += 1
        return await super().load_weights(version, weights, changes, keep_kv=keep_kv)


def adapter(rank: int = 1, **model: int) -> FakeStagedWeights:
    base = FakeStagedWeights(contents=model or MODEL)
    return FakeStagedWeights(contents={"merged": rank}, base=base, rank=rank)


async def load(
    generator: Generator, job: str, version: int, weights: FakeStagedWeights, *, alongside: bool = False
) -> list[str]:
    """Load a version; return for which jobs weights were unloaded, empty: for all."""
    unloaded: list[str] = []
    await generator.replace_weights(
        weights, version, lambda job_id="": unloaded.append(job_id), job_id=job, alongside=alongside
    )
    await generator.resume("loading")
    return unloaded


async def two_jobs(engine: Engine) -> Generator:
    """Return a generator that serves version 3 of a, and 7 of b alongside."""
    generator = Generator(FakeEngineFactory(lambda: engine))
    assert "" in await load(generator, "a", 3, adapter())
    assert await load(generator, "b", 7, adapter(rank=2), alongside=True) == ["b"]
    return generator


async def test_second_job_on_the_same_model_loads_its_adapter_alone() -> None:
    generator = await two_jobs(engine := Engine())
    assert engine.loads == 1
    assert {job: held.rank for job, held in engine.held.items() if held} == {"a": 1, "b": 2}
    generator.submit([replace(request(i, max_tokens=1), job_id=job) for i, job in enumerate(("a", "b"))])
    engine.tick()
    assert {one.sample: one.version for one in generator.take_emissions()} == {0: 3, 1: 7}
    assert generator.capabilities["max_adapters"] == 8


async def test_version_0_of_a_job_is_served_as_the_model_alone() -> None:
    generator = await two_jobs(engine := Engine())
    await load(generator, "c", 0, FakeStagedWeights(contents=MODEL), alongside=True)
    assert (engine.loads, engine.held["c"]) == (1, None)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (adapter(a=2), "its model's weights are not those that this worker serves"),
        (adapter(rank=99), "its adapter must be merged: its rank 99 is above 64"),
        (FakeStagedWeights('{"other": 1}'), "its model's config.json is not that of the model"),
    ],
)
async def test_what_cannot_be_shared_is_refused_and_the_engine_serves_on(
    weights: FakeStagedWeights, reason: str
) -> None:
    generator = await two_jobs(engine := Engine())
    with pytest.raises(UnsuitableWeights, match=reason):
        await load(generator, "c", 1, weights, alongside=True)
    assert not generator.pause_reasons
    assert (engine.loads, sorted(engine.held)) == (1, ["a", "b"])


async def test_other_model_replaces_all_jobs() -> None:
    generator = await two_jobs(engine := Engine())
    assert await load(generator, "c", 1, adapter(a=2)) == [""]
    assert (engine.loads, list(engine.held)) == (2, ["c"])


async def test_engine_without_adapters_loads_the_merged_model() -> None:
    generator = Generator(FakeEngineFactory(lambda: engine))
    engine = Engine(max_adapters=0)
    for job in ("a", "b"):
        assert "" in await load(generator, job, 1, adapter())
    assert (engine.loads, engine.held, generator.capabilities["max_adapters"]) == (2, {}, 0)
