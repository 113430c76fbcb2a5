"""Who has the device, what the trainer asks of its engine there, and what it leaves to others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.job.job import DeviceThread
from rlboost.services.trainer.step.run import DeviceTurn
from tests.support.eventually import eventually
from tests.support.trainer_fakes import FakeEngine, MemoryWeights
from tests.support.trainer_rig import Rig, spec


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    made = DeviceThread()
    yield made
    made.close()


def turn(thread: DeviceThread, offload: Callable[[], object], rig: Rig | None = None) -> DeviceTurn:
    job = (rig or Rig(Path())).claimed(thread)
    job.resources.engine.offload = offload  # type: ignore[method-assign, assignment]
    return DeviceTurn(job, 0)


async def test_lost_turn_offloads_after_the_running_call(thread: DeviceThread) -> None:
    calls: list[str] = []
    ours = turn(thread, lambda: calls.append("offload"))
    ours.set_owned(owned=True)
    running = asyncio.create_task(ours.run(lambda: calls.append("first")))
    await asyncio.sleep(0)
    ours.set_owned(owned=False)
    ours.set_owned(owned=False)
    waiting = asyncio.create_task(ours.run(lambda: calls.append("second")))
    await running
    ours.set_owned(owned=True)
    await waiting
    assert calls == ["first", "offload", "second"]


async def test_idle_time_counts_the_owned_device_without_calls(
    thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("rlboost.services.trainer.step.run.time.monotonic", lambda: float(next(clock)))
    ours = turn(thread, lambda: None)  # 0
    assert ours.idle_s == 0.0  # 1
    ours.set_owned(owned=True)  # 2
    assert ours.idle_s == 1.0  # 3
    during: list[float] = []
    await ours.run(lambda: during.append(ours.idle_s))  # 4, 5 in it, 6
    assert during == [2.0]
    assert ours.idle_s == 3.0  # 7
    ours.end_step()  # 8
    assert ours.idle_s == ours.held_s - ours.busy_s == 4.0


async def test_no_turn_begins_after_the_last_of_the_step(thread: DeviceThread) -> None:
    """Samples of an evaluation still arrive, while the reserved engines may generate again."""
    offloads: list[str] = []
    ours = turn(thread, lambda: offloads.append("offload"))
    ours.set_owned(owned=True)
    ours.end_step()
    held_s = ours.held_s
    ours.set_owned(owned=True)
    ours.set_owned(owned=False)
    await thread.run(lambda: None)
    assert (ours.held_s, offloads) == (held_s, [])


@pytest.mark.parametrize("was_ours", [False, True], ids=["the turn", "the offload"])
async def test_call_waits_again_after_the_turn_is_lost(thread: DeviceThread, *, was_ours: bool) -> None:
    calls: list[str] = []
    rig = Rig(Path())
    ours = turn(thread, lambda: calls.append("offload"), rig)
    if was_ours:
        ours.set_owned(owned=True)
        ours.set_owned(owned=False)
        ours.set_owned(owned=True)
    waiting = asyncio.create_task(ours.run(lambda: calls.append("ours")))
    await asyncio.sleep(0)
    ours.set_owned(owned=True)
    ours.set_owned(owned=False)
    for _ in range(3):
        await thread.run(lambda: None)  # behind the offload, and behind what would have been called after it
    assert set(calls) == {"offload"}
    await eventually(lambda: bool(rig.waits.current()))
    ours.set_owned(owned=True)
    await waiting
    assert calls[-2:] == ["offload", "ours"]


async def test_offload_error_is_raised_by_the_next_call(thread: DeviceThread) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    ours = turn(thread, fail)
    ours.set_owned(owned=True)
    ours.set_owned(owned=False)
    ours.set_owned(owned=True)
    with pytest.raises(MemoryError, match="no room"):
        await ours.run(list)


async def test_end_of_a_turn_moves_nothing(thread: DeviceThread) -> None:
    """What the turn computed is published first."""
    calls: list[str] = []
    ours = turn(thread, lambda: calls.append("offload"))
    ours.set_owned(owned=True)
    ours.end_step()
    await thread.run(lambda: None)
    assert calls == []
    assert ours.held_s > 0


class Watching(MemoryWeights):
    """Notes whether the engine is_offloaded when a version is committed, from which moment on others use its device."""

    def __init__(self, is_offloaded: Callable[[], bool]) -> None:
        super().__init__()
        self._rests = is_offloaded
        self.seen: list[bool] = []

    async def publish(self, version: int, shards: Any, **more: Any) -> None:
        self.seen.append(self._rests())
        await super().publish(version, shards, **more)


async def test_the_engine_rests_before_a_version_is_committed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=3))
    rig.weights = weights = Watching(lambda: rig.engine.is_offloaded)
    await rig.run()
    assert weights.seen == [True] * 4


class Counting(FakeEngine):
    """Counts the rows whose log-probabilities it was asked for, and those that it was trained on."""

    asked = trained = 0

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        self.asked += sum(map(len, batches))
        return super().logprobs(batches)

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: Any) -> dict[str, float]:
        self.trained += sum(map(len, batches))
        return super().accumulate(batches, loss)


@pytest.mark.parametrize(
    ("old_logprobs", "updates", "epochs", "passes"),
    [
        ("sampled", 1, 1, 0),
        ("sampled", 2, 1, 0),
        ("sampled", 1, 3, 0),
        ("recomputed", 1, 1, 0),
        ("recomputed", 2, 1, 1),
        ("recomputed", 1, 3, 1),
        ("auto", 2, 2, 0),
    ],
)
async def test_old_logprobs_cost_a_pass_only_where_they_are_not_known_otherwise(
    tmp_path: Path, old_logprobs: str, updates: int, epochs: int, passes: int
) -> None:
    algorithm = {"group_size": 2, "updates_per_step": updates, "epochs": epochs, "old_logprobs": old_logprobs}
    rig = Rig(tmp_path, spec(steps=2, algorithm=algorithm))
    rig.make_engine = Counting
    await rig.run()
    engine = rig.engine
    assert isinstance(engine, Counting)
    assert engine.trained
    assert epochs * engine.asked == passes * engine.trained
