"""A job that trains an adapter: what is committed, and what it goes on from."""

from __future__ import annotations

from pathlib import Path

from rlboost.shared.weights.manifest import Shard
from tests.support.trainer_fakes import FakeEngine
from tests.support.trainer_rig import Rig

ADAPTER = '{"r": 8}'


def rig_in(folder: Path) -> Rig:
    rig = Rig(folder)
    rig.make_engine = lambda: FakeEngine(ADAPTER)
    return rig


def names(shards: list[Shard]) -> list[str]:
    return [shard.name for shard in shards]


async def undisturbed(folder: Path) -> Rig:
    rig = rig_in(folder)
    assert (await rig.run()).state == "completed"
    return rig


async def test_the_model_is_committed_once_and_then_adapters_that_name_it(tmp_path: Path) -> None:
    rig = await undisturbed(tmp_path)
    assert names(rig.weights.versions[0]) == ["a.weight", "b.weight"]
    for version in range(1, 6):
        assert names(rig.weights.versions[version]) == ["base_model.model.a.weight", "base_model.model.b.weight"]
    assert rig.weights.adapters == dict.fromkeys(range(1, 6), (0, ADAPTER))


async def test_final_model_is_merged_and_the_adapter_is_saved_too(tmp_path: Path) -> None:
    rig = await undisturbed(tmp_path)
    assert rig.folder.adapter == rig.weights.versions[5]
    assert rig.folder.model == list(rig.engine.export_shards())
    assert rig.folder.model != rig.weights.versions[0]
    assert [fields["path"] for kind, fields in await rig.events() if kind == "adapter_saved"] == ["adapter"]


async def test_a_killed_trainers_successor_ends_with_the_same_bits(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "a")
    for killed_in in (0, 3):
        rig = rig_in(tmp_path / f"b{killed_in}")
        await rig.killed_in(killed_in)
        assert (await rig.resume()).state == "completed"
        assert rig.weights.versions == expected.weights.versions
        assert rig.folder.model == expected.folder.model
        assert "weights_restored" not in dict(await rig.events())


async def test_successor_with_another_base_restores_the_committed_base(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    await rig.killed_in(3)
    committed = [shard._replace(data=b"\x00\x00\x80?" * 2) for shard in rig.weights.versions[0]]
    rig.weights.versions[0] = committed
    assert (await rig.resume()).state == "completed"
    assert list(rig.engine.export_shards("base")) == committed
    assert ("weights_restored", {"version": 0}) in await rig.events()


async def test_adapter_job_without_its_committed_base_fails(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    await rig.killed_in(3)
    del rig.weights.versions[0]
    report = await rig.resume()
    assert report.state == "failed"
    assert "version 0, the base model of the adapters, is no longer in the store" in report.error


async def test_a_store_that_lost_everything_gets_the_base_before_the_adapter(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "a")
    rig = rig_in(tmp_path / "b")
    await rig.killed_in(3)
    rig.weights.versions.clear()
    assert (await rig.resume()).state == "completed"
    assert sorted(rig.weights.versions) == [0, 2, 3, 4, 5]
    assert rig.folder.model == expected.folder.model
