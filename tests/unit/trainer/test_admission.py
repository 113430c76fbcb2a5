"""Which calls of an environment process run at the same time, and which of them ended the process."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.admission import Admission


def run(n: int, bad: set[int], limit: int) -> tuple[list[int], set[int], int]:
    """Run calls to their ends; return those that failed, those that succeeded, and how often the process ended."""
    admission = Admission(limit)
    for call in range(n):
        admission.enter(call)
    running, failed, succeeded, n_ends = deque[int](), list[int](), set[int](), 0
    while len(failed) + len(succeeded) < n:
        admitted = admission.admit()
        running += admitted
        assert 0 < len(running) <= limit
        if not bad.isdisjoint(admitted):
            n_ends += 1
            culprit = admission.process_ended(running)
            if culprit is not None:
                failed.append(culprit)
                admission.leave(culprit)
            running.clear()
        else:
            call = running.popleft()
            succeeded.add(call)
            admission.leave(call)
    assert admission.admit() == []
    return failed, succeeded, n_ends


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=4), st.integers(1, 50))
def test_every_call_that_ends_the_process_fails_and_no_other_one(n: int, bad: set[int], limit: int) -> None:
    bad = {call for call in bad if call < n}
    failed, succeeded, _ = run(n, bad, limit)
    assert set(failed) == bad
    assert len(failed) == len(bad)
    assert succeeded == set(range(n)) - bad


@pytest.mark.parametrize(("n", "most"), [(1, 1), (4, 2), (1_024, 6), (65_536, 9)])
def test_search_for_one_call_ends_the_process_a_few_times(n: int, most: int) -> None:
    for bad in {0, n // 2, n - 1}:
        failed, _, n_ends = run(n, {bad}, n)
        assert (failed, n_ends <= most) == ([bad], True)


def test_calls_that_had_not_begun_are_no_suspects() -> None:
    admission = Admission(8)
    for call in range(4):
        admission.enter(call)
    assert admission.admit() == [0, 1, 2, 3]
    assert admission.process_ended([2]) == 2
    admission.leave(2)
    assert admission.admit() == [0, 1, 3]


def test_end_that_blames_no_call_repeats_all() -> None:
    admission = Admission(8)
    admission.enter(0)
    assert admission.admit() == [0]
    assert admission.process_ended([0], blames=False) is None
    assert admission.admit() == [0]
