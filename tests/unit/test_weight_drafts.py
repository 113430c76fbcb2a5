"""What a store remembers of uploads under way, and what who asks makes of it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.weight_store.domain import drafts as rules
from services.weight_store.domain.drafts import Drafts
from services.weight_store.drafts import DraftBoard
from shared.weights.drafts import Draft, DraftPart
from shared.weights.manifest import ChunkRef, digest_of

JOB, OTHER = "job-1", "job-2"
REFS = [ChunkRef(digest_of(b"%d" % number), 1000) for number in range(30)]


def part(start: int, *numbers: int, rank: int = 0) -> DraftPart:
    return DraftPart(rank=rank, start=start, chunks=tuple(REFS[number] for number in numbers))


def test_news_are_what_came_after_the_cursor() -> None:
    drafts = Drafts(first=100)
    assert drafts.news(JOB, -1) is None
    drafts.put(JOB, 3, part(0, 1, 2), 0.0)
    first = drafts.news(JOB, -1)
    assert first is not None
    assert (first.version, first.parts) == (3, (part(0, 1, 2),))
    assert drafts.news(JOB, first.cursor) is None
    drafts.put(JOB, 3, part(2, 4), 0.0)
    drafts.put(JOB, 3, part(0, 7, rank=1), 0.0)
    later = drafts.news(JOB, first.cursor)
    assert later is not None
    assert later.parts == (part(2, 4), part(0, 7, rank=1))
    assert drafts.news(OTHER, -1) is None


def test_a_rank_that_is_through_is_known_whole_where_it_was_talked_of() -> None:
    drafts = Drafts(first=0)
    drafts.complete(JOB, 3, 0, REFS[:3], 0.0)
    assert drafts.news(JOB, -1) is None
    drafts.put(JOB, 3, part(0, 5, 1), 0.0)
    drafts.complete(JOB, 3, 1, REFS[:3], 0.0)
    drafts.complete(JOB, 2, 0, REFS[:3], 0.0)
    news = drafts.news(JOB, -1)
    assert news is not None
    assert news.parts == (part(0, 5, 1),)
    drafts.complete(JOB, 3, 0, [REFS[0], REFS[1], REFS[0], REFS[2]], 0.0)
    news = drafts.news(JOB, news.cursor)
    assert news is not None
    assert news.parts == (part(2, 0, 2),)


def test_a_draft_ends_with_the_commit_of_its_version_or_a_later_one() -> None:
    drafts = Drafts(first=0)
    drafts.put(JOB, 3, part(0, 1), 0.0)
    drafts.end(JOB, 2)
    assert drafts.news(JOB, -1)
    drafts.end(JOB, 3)
    assert drafts.news(JOB, -1) is None
    drafts.put(JOB, 5, part(0, 1), 0.0)
    drafts.end(JOB, 7)
    assert drafts.news(JOB, -1) is None


def test_a_draft_ends_when_nothing_was_said_of_it_for_long() -> None:
    drafts = Drafts(first=0)
    drafts.put(JOB, 3, part(0, 1), 10.0)
    drafts.put(OTHER, 3, part(0, 1), 10.0)
    drafts.put(JOB, 3, part(1, 2), 20.0)
    drafts.expire(before=15.0)
    assert drafts.news(JOB, -1)
    assert drafts.news(OTHER, -1) is None


def test_all_drafts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_CHUNKS", 5)
    drafts = Drafts(first=0)
    assert drafts.put(JOB, 3, part(0, 1, 2, 3), 0.0)
    assert not drafts.put(OTHER, 3, part(0, 1, 2, 3), 0.0)
    assert drafts.put(OTHER, 3, part(0, 1, 2), 0.0)
    assert not drafts.put("job-3", 0, part(0), 0.0) or drafts.news("job-3", -1) is None
    drafts.end(JOB, 3)
    assert drafts.put("job-3", 0, part(0, 9), 0.0)


def test_another_process_counts_on_where_the_one_before_cannot_have_been() -> None:
    before, after, known = Drafts(first=1000), Drafts(first=2000), Draft()
    before.put(JOB, 3, part(0, 1, 2), 0.0)
    news = before.news(JOB, -1)
    assert news is not None
    known.take(news)
    # The publisher goes on with what the new process has not been told.
    after.put(JOB, 3, part(2, 3), 0.0)
    more = after.news(JOB, news.cursor)
    assert more is not None
    known.take(more)
    assert list(known.chunks()) == [REFS[1], REFS[2], REFS[3]]


def test_a_clock_that_was_set_back_costs_nothing_but_a_repetition() -> None:
    drafts = Drafts(first=10)
    drafts.put(JOB, 3, part(0, 1), 0.0)
    news = drafts.news(JOB, 99_999)
    assert news is not None
    assert news.parts == (part(0, 1),)
    assert drafts.news(JOB, news.cursor) is None


class Said:
    """What publishers say, and what is true after it."""

    def __init__(self) -> None:
        self.lists: dict[int, list[int]] = {0: [], 1: []}

    def say(self, rank: int, start: int, numbers: list[int]) -> DraftPart:
        start = min(start, len(self.lists[rank]))
        self.lists[rank][start:] = numbers
        return part(start, *numbers, rank=rank)

    def digests(self) -> set[str]:
        return {REFS[number].digest for numbers in self.lists.values() for number in numbers}


Saying = tuple[int, int, list[int]]
"""(rank, start, numbers of chunks)."""
SAYINGS = st.tuples(st.integers(0, 1), st.integers(0, 9), st.lists(st.integers(0, 29), min_size=1, max_size=4))


@given(st.lists(st.one_of(st.none(), SAYINGS), max_size=30))
def test_whoever_asks_at_any_time_knows_what_publishers_said_last(
    events: list[tuple[int, int, list[int]] | None],
) -> None:
    drafts, said, known, cursor = Drafts(first=7), Said(), Draft(), -1
    for event in [*events, None]:
        if event is not None:
            drafts.put(JOB, 3, said.say(*event), 0.0)
        elif (news := drafts.news(JOB, cursor)) is not None:
            cursor = news.cursor
            known.take(news)
    assert {chunk.digest for chunk in known.chunks()} == said.digests()


def test_a_later_versions_draft_replaces_what_was_known() -> None:
    drafts, known = Drafts(first=0), Draft()
    drafts.put(JOB, 3, part(0, 1, 2), 0.0)
    news = drafts.news(JOB, -1)
    assert news is not None
    known.take(news)
    drafts.put(JOB, 4, part(0, 5), 0.0)
    news = drafts.news(JOB, news.cursor)
    assert news is not None
    known.take(news)
    assert (known.version, list(known.chunks())) == (4, [REFS[5]])


async def test_who_waits_hears_at_once_of_what_is_said() -> None:
    board = DraftBoard(lambda: 5.0)
    waiting = asyncio.create_task(board.news(JOB, -1, wait_s=20.0))
    await asyncio.sleep(0)
    board.put(OTHER, 1, part(0, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    board.put(JOB, 1, part(0, 2))
    news = await waiting
    assert (news.version, news.parts) == (1, (part(0, 2),))
    nothing = await board.news(JOB, news.cursor, wait_s=0.0)
    assert (nothing.cursor, nothing.version, nothing.parts) == (news.cursor, None, ())


async def test_a_store_that_stops_keeps_nobody_waiting() -> None:
    board, stop = DraftBoard(lambda: 5.0), asyncio.Event()
    expiring = asyncio.create_task(board.expire(stop))
    waiting = asyncio.create_task(board.news(JOB, -1, wait_s=3600.0))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(5.0):
        assert (await waiting).version is None
        await expiring
