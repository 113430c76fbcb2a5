"""Reads from streams take a bounded number of bytes, also where entries are large."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.trainer.step.intake import FinishedLog
from rlboost.services.trainer.step.judging import Questions
from rlboost.shared.messages import GroupRequested, SampleFinished, Sampling
from rlboost.shared.streams import bus as bus_module
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Entry, RawEntry, ReadSize
from rlboost.shared.wire import F32, I32, pack
from rlboost.tracing import Span, follow
from tests.support.builders import heartbeat, worker_joined
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus
from tests.support.stream_entries import read_all
from tests.support.trainer_rig import JOB, Rig

STREAM = names.rollouts_finished(JOB)
MAX_BYTES = 64 << 10
N, LARGE = 60, 8 << 10


class Metered(MemoryBus):
    """Records how many bytes each read has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes: list[int] = []

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        return self._metered(await super().read(cursors, count=count, block_s=block_s))

    async def read_with_raw(
        self, cursors: Mapping[str, str], raw_streams: Collection[str], *, count: int = 512, block_s: float = 0.0
    ) -> tuple[list[Entry], list[RawEntry]]:
        entries, raw = await super().read_with_raw(cursors, raw_streams, count=count, block_s=block_s)
        self.read_bytes.append(sum(entry.n_bytes for entry in raw))
        return entries, raw

    def _metered(self, entries: list[Entry]) -> list[Entry]:
        self.read_bytes.append(sum(entry.n_bytes for entry in entries))
        return entries


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Metered:
    monkeypatch.setattr(bus_module, "MAX_BYTES", MAX_BYTES)
    monkeypatch.setattr(bus_module, "_FIRST_BYTES", LARGE)
    return Metered()


def finished(sample: int) -> SampleFinished:
    """Return a completion of one token with as many routed experts as a long one has."""
    columns = {"tokens": pack([5], I32), "logprobs": pack([-1.0], F32), "routed_experts": bytes(LARGE)}
    return SampleFinished(sample=sample, finish="stop", spans=[("a", 0, 1)], attempts=1, group_done=False, **columns)


def entries(*sizes: int) -> Sequence[RawEntry]:
    return [RawEntry("s", f"{number}-0", bytes(size)) for number, size in enumerate(sizes)]


def test_count_follows_the_largest_recent_entry(bus: Metered) -> None:
    size = ReadSize(100)
    assert size.count == 8
    size.update(entries(10, MAX_BYTES // 2), entries(10))
    assert size.count == 2
    size.update(entries(3 * MAX_BYTES))
    assert size.count == 1
    size.update([])
    assert size.count == 1, "an empty read says nothing about the next one"
    for _ in range(40):
        size.update(entries(10))
    assert size.count == 100


async def test_trainer_reads_large_samples_a_few_at_a_time(bus: Metered) -> None:
    for sample in range(N):
        await bus.append(STREAM, finished(sample))
    rig = Rig(Path())
    rig.bus = bus
    log = FinishedLog(rig.claimed(), "0-0")
    for sample in range(N):
        entry = await log.peek()
        assert isinstance(entry.message, SampleFinished)
        assert entry.message.sample == sample
        log.take()
    assert max(bus.read_bytes) <= MAX_BYTES + LARGE


async def test_trainer_reads_a_teachers_scores_of_large_samples_a_few_at_a_time(bus: Metered) -> None:
    serving = f"{JOB}.teacher"
    for sample in range(N):
        await bus.append(names.rollouts_finished(serving), finished(sample))
    rig = Rig(Path())
    rig.bus = bus
    questions = Questions(rig.claimed(), {serving: 2})
    reading = asyncio.create_task(questions.read())
    asked = GroupRequested(
        job_id=serving, group=N - 1, n=1, prompt=pack([1], I32), sampling=Sampling(), version=0, seed=0, vocab_size=9
    )
    assert await questions.answer(asked) == finished(N - 1)
    reading.cancel()
    assert max(bus.read_bytes) <= MAX_BYTES + LARGE


async def test_recovery_reads_large_samples_a_few_at_a_time(bus: Metered) -> None:
    for sample in range(N):
        await bus.append(STREAM, finished(sample))
    assert len(await read_all(bus, STREAM)) == N
    assert max(bus.read_bytes) <= MAX_BYTES + LARGE


async def test_manager_relays_large_reports_a_few_at_a_time(bus: Metered) -> None:
    manager = Manager(bus, lease_s=2.0, redis_limit_s=9.0, record=manager_record("127.0.0.1", 1, "here"))
    assert await manager.try_lead()
    workers = [(await manager.identities.create("w", "preemptible", manager.write))[0] for _ in range(2)]
    for worker in workers:
        await bus.append(names.worker_reports(worker), worker_joined(worker))
        for _ in range(N):
            await bus.append(names.worker_reports(worker), heartbeat(worker, job_id="j" * LARGE))
    bus.read_bytes.clear()
    for _ in range(2 * N):
        await manager.turn()
    assert 0 < max(bus.read_bytes) <= MAX_BYTES + 2 * LARGE
    assert not any(await bus.read({names.worker_reports(worker): "0-0" for worker in workers}))


async def test_tracing_reads_large_entries_a_few_at_a_time(bus: Metered) -> None:
    streams = (names.TOKEN_LOG, names.WEIGHTS_COMMITTED)
    for stream in streams:
        for _ in range(N):
            await bus.append(stream, heartbeat("w", job_id="j" * LARGE))
    stop = asyncio.Event()
    following = asyncio.create_task(follow(bus, _no_spans, stop))
    await eventually(lambda: bus.read_bytes[-2:] == [0, 0] and sum(bus.read_bytes) >= 2 * N * LARGE)
    stop.set()
    await following
    assert max(bus.read_bytes) <= MAX_BYTES + 2 * LARGE


def _no_spans(_: Sequence[Span]) -> int:
    raise AssertionError("heartbeats have no spans")
