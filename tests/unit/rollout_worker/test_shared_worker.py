"""One worker with adapters of several jobs: what a cancelled, damaged or wrong adapter of one leaves to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlboost.shared.ids import JOB_SHIFT
from rlboost.shared.messages import (
    FINISH_RELEASED,
    Alongside,
    Assign,
    Event,
    Message,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.streams.names import job_events
from rlboost.shared.weights.manifest import ParityReference, ScoredSequence
from tests.support.eventually import eventually
from tests.support.worker_fakes import FakeStagedWeights
from tests.support.worker_manager import JOB, assign
from tests.support.worker_rig import Rig, SlowToLoad

B1 = 2 << JOB_SHIFT | 1
ENDLESS = 1_000_000


def adapter(rank: int = 1) -> FakeStagedWeights:
    return FakeStagedWeights(contents={"merged": rank}, base=FakeStagedWeights(contents={"w": 1}), rank=rank)


def use(*others: tuple[str, int]) -> UseVersion:
    return UseVersion(job_id=JOB, version=0, alongside=tuple(Alongside(job_id=job, version=n) for job, n in others))


def assign_b(version: int) -> Message:
    return Assign(job_id="b", version=version, samples=assign(B1, max_tokens=ENDLESS).samples)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(max_adapters=8)
    rig.weights.versions = {(job, version): adapter() for job in (JOB, "b", "c") for version in range(3)}
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    yield rig
    rig.weights.may_pull.set()
    rig.engine.may_load.set()
    rig.stop.set()
    await asyncio.wait({running})


async def started(rig: Rig, *commands: Message) -> str:
    """Return a worker that serves version 0 of both jobs, and generates a sample of the first."""
    worker = await rig.manager.joined()
    await rig.manager.send(worker, use(("b", 0)))
    await serves(rig, worker, {"b": 0})
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS), *commands)
    await rig.manager.until_generated((1, 1), tokens=3)
    return worker


async def serves(rig: Rig, worker: str, alongside: dict[str, int]) -> WorkerHeartbeat:
    async def heartbeat() -> WorkerHeartbeat:
        last = await rig.manager.until(worker, "ready", 0)
        assert dict(last.alongside) == alongside
        return last

    return await eventually(heartbeat)


async def more_tokens(rig: Rig, sample: int = 1) -> None:
    n = len((await rig.manager.generated())[sample, 1].tokens)
    await rig.manager.until_generated((sample, 1), tokens=n + 10)


async def events(rig: Rig, job_id: str) -> dict[str, Event]:
    found = [entry.message for entry in await rig.manager.entries(job_events(job_id))]
    return {event.kind: event for event in found if isinstance(event, Event)}


async def test_pull_under_way_survives_a_change_of_another_job(rig: Rig) -> None:
    worker = await started(rig)
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, use(("b", 1)), use(("b", 1), ("c", 0)))
    await eventually(lambda: rig.connection.session._assigned_alongside == {"b": 1, "c": 0})
    rig.weights.may_pull.set()
    await serves(rig, worker, {"b": 1, "c": 0})
    assert rig.weights.pulled.count(("b", 1)) == 1


async def test_engine_resumes_after_a_cancelled_adapter_only_once_that_is_verified(rig: Rig) -> None:
    worker = await started(rig, assign_b(0))
    await rig.manager.until_generated((B1, 1), tokens=3)
    rig.engine.may_load.clear()
    await rig.manager.send(worker, use(("b", 1)))
    await eventually(lambda: rig.generator.is_loading)
    await rig.manager.send(worker, use(("b", 2)))
    await eventually(
        lambda: rig.connection.session.alongside == {} and rig.connection.session._alongside["b"].version == 2
    )
    for _ in range(20):
        await asyncio.sleep(0.005)
        assert "loading" in rig.generator.pause_reasons, "the adapter in the engine has not been verified"
    rig.engine.may_load.set()
    await serves(rig, worker, {"b": 2})
    await more_tokens(rig)
    await more_tokens(rig, B1)
    assert not rig.generator.pause_reasons


async def test_job_that_leaves_during_its_load_leaves_no_adapter(rig: Rig) -> None:
    worker = await started(rig, assign_b(0))
    rig.engine.may_load.clear()
    await rig.manager.send(worker, use(("b", 1), ("c", 0)))
    await eventually(lambda: rig.generator.is_loading)
    await rig.manager.send(worker, use(("c", 0)))
    await eventually(lambda: list(rig.connection.session._alongside) == ["c"])
    rig.engine.may_load.set()
    await serves(rig, worker, {"c": 0})
    await more_tokens(rig)
    assert sorted(rig.engine.held) == ["c", JOB]


@pytest.mark.parametrize("stays", [False, True])
async def test_damaged_adapter_of_a_cancelled_load_is_never_decoded_with(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, stays: bool
) -> None:
    load = SlowToLoad.load_adapter

    async def damaged(engine: SlowToLoad, job_id: str, version: int, *args: Any, **kwargs: Any) -> list[str]:
        await load(engine, job_id, version, *args, **kwargs)
        return ["w"] if (job_id, version) == ("b", 1) else []

    monkeypatch.setattr(SlowToLoad, "load_adapter", damaged)
    worker = await started(rig, assign_b(0))
    rig.engine.may_load.clear()
    await rig.manager.send(worker, use(("b", 1)))
    await eventually(lambda: rig.generator.is_loading)
    await rig.manager.send(worker, use(("b", 2)) if stays else use())
    await eventually(lambda: rig.connection.session._assigned_alongside != {"b": 1})
    rig.engine.may_load.set()
    if stays:
        await eventually(lambda: left(rig))
    else:
        await more_tokens(rig)
        assert list(rig.engine.held) == [JOB]
    assert 1 not in (await rig.manager.generated())[B1, 1].versions


@pytest.mark.parametrize("has_samples", [False, True])
async def test_adapter_that_fails_the_parity_check_leaves_the_others_served(rig: Rig, *, has_samples: bool) -> None:
    row = ScoredSequence(prompt=(1, 2), completion=(3, 4), logprobs=(0.0, 0.0))
    wrong = rig.weights.versions["b", 1]
    wrong.parity_reference = ParityReference(temperature=1.0, dtype="float32", rows=(row,))
    worker = await started(rig, *([assign_b(0)] if has_samples else []))
    await rig.manager.send(worker, use(("b", 1)))
    found = await eventually(lambda: reported(rig))
    assert {kind: event.fields["version"] for kind, event in found.items()} == {
        "parity_check_failed": 1,
        "adapter_not_shared": 1,
    }
    if has_samples:  # which the adapter in the engine was for
        worker = await rig.manager.joined(2)
        await rig.manager.send(worker, use(), assign(1, attempt=2, max_tokens=40))
        await rig.manager.until_finished((1, 2))
    else:
        await more_tokens(rig)
        assert len(await rig.manager.received(WorkerJoined)) == 1
    assert list(rig.engine.held) == [JOB]
    assert await events(rig, JOB) == {}
    assert (B1, 1) not in (made := await rig.manager.generated()) or 1 not in made[B1, 1].versions


@pytest.mark.parametrize(("refusal", "lasting"), [("its rank is too high", 1.0), ("", 0.0)])
async def test_only_an_adapter_that_must_be_merged_is_reported_for_all_versions(
    rig: Rig, refusal: str, lasting: float
) -> None:
    worker = await started(rig)
    rig.weights.versions["c", 0] = adapter(rank=99) if refusal else FakeStagedWeights(contents={"w": 2})
    rig.engine.adapter_refusals[99] = refusal
    await rig.manager.send(worker, use(("b", 0), ("c", 0)))
    found = await eventually(lambda: events(rig, "c"))
    assert found["adapter_not_shared"].fields["lasting"] == lasting
    await more_tokens(rig)


async def reported(rig: Rig) -> dict[str, Event]:
    found = await events(rig, "b")
    return found if len(found) == 2 else {}


async def left(rig: Rig) -> bool:
    return any("not what was published" in one.reason for one in await rig.manager.received(WorkerLeft))


async def test_job_that_must_be_merged_is_the_one_reported_and_others_resume_elsewhere(rig: Rig) -> None:
    worker = await started(rig, assign_b(0))
    rig.weights.versions["c", 1] = adapter(rank=99)
    rig.engine.adapter_refusals[99] = "its rank is too high"
    await rig.manager.until_generated((B1, 1), tokens=3)
    others = tuple(Alongside(job_id=job, version=0) for job in (JOB, "b"))
    await rig.manager.send(worker, UseVersion(job_id="c", version=1, alongside=others))
    made = await rig.manager.until_finished((1, 1), (B1, 1))
    assert {row.finish for row in made.values()} == {FINISH_RELEASED}
    assert {version for row in made.values() for version in row.versions} == {0}
    found = await eventually(lambda: events(rig, "c"))
    assert "its rank is too high" in str(found["adapter_not_shared"].fields["reason"])
    assert await events(rig, "b") == await events(rig, JOB) == {}
