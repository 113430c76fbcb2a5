"""What the watcher does about what its sources say, and about sources that say nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog

from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation
from rlboost.services.rollout_worker.life import PreemptionWatch
from rlboost.shared.errors import Retryable
from tests.support.eventually import eventually

Word = Notice | RebalanceRecommendation | Retryable | None


class FakeSource:
    """Says what a test has put into `word`."""

    def __init__(self, name: str = "fake", *, there: bool = True, word: Word = None) -> None:
        self.name = name
        self.there = there
        self.word = word
        self.asked = 0
        self.looked_for = 0
        self.acknowledged: list[tuple[Notice, float]] = []

    async def is_available(self) -> bool:
        self.looked_for += 1
        return self.there

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        self.asked += 1
        if isinstance(self.word, Retryable):
            raise self.word
        return self.word

    async def acknowledge(self, notice: Notice) -> None:
        self.acknowledged.append((notice, time.monotonic()))


class FakeDrainable:
    """Drains at a notice and has handed off once `may_go` is set."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.may_go = asyncio.Event()
        self.may_go.set()
        self.notices: list[Notice] = []
        self.advice: list[RebalanceRecommendation] = []

    def on_preemption_notice(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.stop.set()

    async def on_rebalance_recommendation(self, advice: RebalanceRecommendation) -> None:
        self.advice.append(advice)

    async def wait_handed_off(self) -> None:
        await self.may_go.wait()


@asynccontextmanager
async def watching(watch: PreemptionWatch, drainable: FakeDrainable) -> AsyncIterator[asyncio.Task[None]]:
    """Run the watch until the end of the block."""
    running = asyncio.create_task(watch.run(drainable.stop), name="watch")
    try:
        yield running
    finally:
        drainable.stop.set()
        drainable.may_go.set()
        await running


def watch_of(
    *sources: FakeSource,
    drainable: FakeDrainable,
    candidates: tuple[FakeSource, ...] = (),
    acknowledge_after_s: float = 0.0,
) -> PreemptionWatch:
    return PreemptionWatch(
        sources, candidates, drainable, poll_interval_s=0.005, acknowledge_after_s=acknowledge_after_s
    )


def at_least(n: int, count: Callable[[], int]) -> Callable[[], bool]:
    return lambda: count() >= n


async def test_a_notice_of_any_source_reaches_the_worker() -> None:
    drainable, quiet, speaks = FakeDrainable(), FakeSource(), FakeSource()
    async with watching(watch_of(quiet, speaks, drainable=drainable), drainable) as running:
        await eventually(at_least(3, lambda: speaks.asked))
        assert drainable.notices == []
        speaks.word = Notice("gone", 30.0)
        await running
    assert drainable.notices == [Notice("gone", 30.0)]
    assert (quiet.acknowledged, speaks.acknowledged) == ([], [])


async def test_recommendation_is_forwarded_once_and_a_later_notice_too() -> None:
    drainable, source = FakeDrainable(), FakeSource(word=RebalanceRecommendation("likely"))
    async with watching(watch_of(source, drainable=drainable), drainable) as running:
        await eventually(at_least(5, lambda: source.asked))
        assert drainable.advice == [RebalanceRecommendation("likely")]
        source.word = Notice("gone")
        await running
    assert drainable.notices == [Notice("gone")]


async def test_failing_source_is_polled_again_and_logged_once() -> None:
    drainable, source = FakeDrainable(), FakeSource(word=Retryable("status 503"))
    with structlog.testing.capture_logs() as lines:
        async with watching(watch_of(source, drainable=drainable), drainable) as running:
            await eventually(at_least(6, lambda: source.asked))
            source.word = None
            answered = source.asked
            await eventually(at_least(answered + 2, lambda: source.asked))
            source.word = Notice("gone")
            await running
    assert [line["event"] for line in lines] == ["metadata_unavailable", "metadata_recovered"]
    assert drainable.notices == [Notice("gone")]


async def test_only_the_detected_cloud_is_polled() -> None:
    drainable, here, elsewhere = FakeDrainable(), FakeSource("here"), FakeSource("elsewhere", there=False)
    async with watching(watch_of(drainable=drainable, candidates=(elsewhere, here)), drainable):
        await eventually(at_least(3, lambda: here.asked))
    assert (elsewhere.looked_for, elsewhere.asked, here.looked_for) == (1, 0, 1)


async def test_missing_cloud_is_logged_and_detection_stops() -> None:
    drainable, elsewhere = FakeDrainable(), FakeSource("elsewhere", there=False)
    with structlog.testing.capture_logs() as lines:
        async with watching(watch_of(drainable=drainable, candidates=(elsewhere,)), drainable):
            await eventually(lambda: [line["event"] for line in lines] == ["notice_source_missing"])
            looked_for = elsewhere.looked_for
            await asyncio.sleep(0.05)
    assert elsewhere.looked_for == looked_for == 4


async def test_notice_is_acknowledged_after_hand_off_and_delay() -> None:
    drainable, source = FakeDrainable(), FakeSource(word=Notice("gone", 30.0, "event"))
    drainable.may_go.clear()
    began = time.monotonic()
    async with watching(watch_of(source, drainable=drainable, acknowledge_after_s=0.1), drainable) as running:
        await drainable.stop.wait()
        await asyncio.sleep(0.15)
        assert source.acknowledged == []
        drainable.may_go.set()
        await running
    ((notice, at),) = source.acknowledged
    assert notice.event_id == "event"
    assert at - began >= 0.1


async def test_a_stop_without_a_notice_acknowledges_nothing() -> None:
    drainable, source = FakeDrainable(), FakeSource()
    async with watching(watch_of(source, drainable=drainable), drainable):
        await eventually(at_least(1, lambda: source.asked))
    assert source.acknowledged == []


async def test_failed_acknowledgment_is_not_a_failure() -> None:
    class Deaf(FakeSource):
        async def acknowledge(self, notice: Notice) -> None:
            raise Retryable("status 500")

    drainable, source = FakeDrainable(), Deaf(word=Notice("gone", 30.0, "event"))
    with structlog.testing.capture_logs() as lines:
        await watch_of(source, drainable=drainable).run(drainable.stop)
    assert [line["event"] for line in lines] == ["notice_not_acknowledged"]


async def test_unexpected_error_of_a_source_is_raised() -> None:
    class Broken(FakeSource):
        async def poll(self) -> Notice | None:
            raise ZeroDivisionError

    drainable = FakeDrainable()
    with pytest.raises(ExceptionGroup):
        await watch_of(Broken(), drainable=drainable).run(drainable.stop)
