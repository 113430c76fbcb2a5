"""What the watcher does about what its sources say, and about sources that say nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog

from services.rollout_worker.domain.notices import Advice, Notice
from services.rollout_worker.notices import Watch
from shared.errors import Retryable
from tests.support.eventually import eventually

Word = Notice | Advice | Retryable | None


class FakeSource:
    """Says what a test has put into `word`."""

    def __init__(self, name: str = "fake", *, there: bool = True, word: Word = None) -> None:
        self.name = name
        self.there = there
        self.word = word
        self.asked = 0
        self.looked_for = 0
        self.acknowledged: list[tuple[Notice, float]] = []

    async def found(self) -> bool:
        self.looked_for += 1
        return self.there

    async def ask(self) -> Notice | Advice | None:
        self.asked += 1
        if isinstance(self.word, Retryable):
            raise self.word
        return self.word

    async def acknowledge(self, notice: Notice) -> None:
        self.acknowledged.append((notice, time.monotonic()))


class FakeLeaver:
    """Leaves at a notice, once `may_go` is set."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.may_go = asyncio.Event()
        self.may_go.set()
        self.notices: list[Notice] = []
        self.advice: list[Advice] = []

    def take_notice(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.stop.set()

    async def take_advice(self, advice: Advice) -> None:
        self.advice.append(advice)

    async def handed_off(self) -> None:
        await self.may_go.wait()


@asynccontextmanager
async def watching(watch: Watch, leaver: FakeLeaver) -> AsyncIterator[asyncio.Task[None]]:
    """Run the watch until the end of the block."""
    running = asyncio.create_task(watch.run(leaver.stop), name="watch")
    try:
        yield running
    finally:
        leaver.stop.set()
        leaver.may_go.set()
        await running


def watch_of(
    *sources: FakeSource, leaver: FakeLeaver, candidates: tuple[FakeSource, ...] = (), acknowledge_after_s: float = 0.0
) -> Watch:
    return Watch(sources, candidates, leaver, every_s=0.005, acknowledge_after_s=acknowledge_after_s)


def at_least(n: int, count: Callable[[], int]) -> Callable[[], bool]:
    return lambda: count() >= n


async def test_a_notice_of_any_source_reaches_the_worker() -> None:
    leaver, quiet, speaks = FakeLeaver(), FakeSource(), FakeSource()
    async with watching(watch_of(quiet, speaks, leaver=leaver), leaver) as running:
        await eventually(at_least(3, lambda: speaks.asked))
        assert leaver.notices == []
        speaks.word = Notice("gone", 30.0)
        await running
    assert leaver.notices == [Notice("gone", 30.0)]
    assert (quiet.acknowledged, speaks.acknowledged) == ([], [])


async def test_advice_is_passed_on_once_and_the_notice_after_it_too() -> None:
    leaver, source = FakeLeaver(), FakeSource(word=Advice("likely"))
    async with watching(watch_of(source, leaver=leaver), leaver) as running:
        await eventually(at_least(5, lambda: source.asked))
        assert leaver.advice == [Advice("likely")]
        source.word = Notice("gone")
        await running
    assert leaver.notices == [Notice("gone")]


async def test_a_source_that_fails_is_asked_again_and_spoken_of_once() -> None:
    leaver, source = FakeLeaver(), FakeSource(word=Retryable("status 503"))
    with structlog.testing.capture_logs() as lines:
        async with watching(watch_of(source, leaver=leaver), leaver) as running:
            await eventually(at_least(6, lambda: source.asked))
            source.word = None
            answered = source.asked
            await eventually(at_least(answered + 2, lambda: source.asked))
            source.word = Notice("gone")
            await running
    assert [line["event"] for line in lines] == ["notices_unanswered", "notices_answered_again"]
    assert leaver.notices == [Notice("gone")]


async def test_of_the_clouds_only_the_one_that_is_there_is_asked() -> None:
    leaver, here, elsewhere = FakeLeaver(), FakeSource("here"), FakeSource("elsewhere", there=False)
    async with watching(watch_of(leaver=leaver, candidates=(elsewhere, here)), leaver):
        await eventually(at_least(3, lambda: here.asked))
    assert (elsewhere.looked_for, elsewhere.asked, here.looked_for) == (1, 0, 1)


async def test_where_there_is_no_cloud_it_says_so_and_stops_looking() -> None:
    leaver, elsewhere = FakeLeaver(), FakeSource("elsewhere", there=False)
    with structlog.testing.capture_logs() as lines:
        async with watching(watch_of(leaver=leaver, candidates=(elsewhere,)), leaver):
            await eventually(lambda: [line["event"] for line in lines] == ["no_notices"])
            looked_for = elsewhere.looked_for
            await asyncio.sleep(0.05)
    assert elsewhere.looked_for == looked_for == 4


async def test_a_notice_is_acknowledged_after_the_hand_off_and_not_before_others_had_time_for_theirs() -> None:
    leaver, source = FakeLeaver(), FakeSource(word=Notice("gone", 30.0, "event"))
    leaver.may_go.clear()
    began = time.monotonic()
    async with watching(watch_of(source, leaver=leaver, acknowledge_after_s=0.1), leaver) as running:
        await leaver.stop.wait()
        await asyncio.sleep(0.15)
        assert source.acknowledged == []
        leaver.may_go.set()
        await running
    ((notice, at),) = source.acknowledged
    assert notice.event_id == "event"
    assert at - began >= 0.1


async def test_a_stop_without_a_notice_acknowledges_nothing() -> None:
    leaver, source = FakeLeaver(), FakeSource()
    async with watching(watch_of(source, leaver=leaver), leaver):
        await eventually(at_least(1, lambda: source.asked))
    assert source.acknowledged == []


async def test_an_acknowledgement_that_nobody_takes_is_not_a_failure() -> None:
    class Deaf(FakeSource):
        async def acknowledge(self, notice: Notice) -> None:
            raise Retryable("status 500")

    leaver, source = FakeLeaver(), Deaf(word=Notice("gone", 30.0, "event"))
    with structlog.testing.capture_logs() as lines:
        await watch_of(source, leaver=leaver).run(leaver.stop)
    assert [line["event"] for line in lines] == ["notice_not_acknowledged"]


async def test_an_error_that_nobody_expected_is_not_hidden() -> None:
    class Broken(FakeSource):
        async def ask(self) -> Notice | None:
            raise ZeroDivisionError

    leaver = FakeLeaver()
    with pytest.raises(ExceptionGroup):
        await watch_of(Broken(), leaver=leaver).run(leaver.stop)
