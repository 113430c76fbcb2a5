from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.plan import Accumulate, OptimizerStep, UpdatePlanner, pack, select

lengths = st.integers(1, 60)


@dataclass(frozen=True)
class Stub:
    number: int
    n_tokens: int


def stubs(sizes: list[int]) -> list[Stub]:
    return [Stub(i, n) for i, n in enumerate(sizes)]


@given(st.lists(lengths, max_size=40), st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_budget(sizes: list[int], budget: int) -> None:
    batches = select(stubs(sizes), pack(stubs(sizes), budget))
    assert sorted(row.number for batch in batches for row in batch) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) == 1 or sum(row.n_tokens for row in batch) <= budget


@given(st.lists(lengths, max_size=40), st.integers(1, 100))
def test_only_one_micro_batch_is_at_most_half_full(sizes: list[int], budget: int) -> None:
    filled = [sum(sizes[index] for index in batch) for batch in pack(stubs(sizes), budget)]
    assert sum(2 * n <= budget for n in filled) <= 1


@given(
    groups=st.lists(st.lists(lengths, max_size=6), min_size=1, max_size=20),
    updates=st.integers(1, 5),
    budget=st.integers(10, 200),
)
def test_a_step_trains_every_row_once_in_the_right_update(groups: list[list[int]], updates: int, budget: int) -> None:
    updates = min(updates, len(groups))
    planner: UpdatePlanner[Stub] = UpdatePlanner(len(groups), updates, budget)
    parts: list[set[int]] = [set()]
    for number, sizes in enumerate(groups):
        for work in planner.add([Stub(number * 100 + i, n) for i, n in enumerate(sizes)]):
            if isinstance(work, Accumulate):
                parts[-1] |= {row.number for batch in work.batches for row in batch}
            else:
                parts.append(set())
    assert parts.pop() == set()
    ends = [(i + 1) * len(groups) // updates for i in range(updates)]
    starts = [0, *ends[:-1]]
    expected = [
        {n * 100 + i for n in range(start, end) for i in range(len(groups[n]))}
        for start, end in zip(starts, ends, strict=True)
    ]
    assert parts == expected


def test_micro_batches_begin_before_the_last_group_is_there() -> None:
    planner: UpdatePlanner[Stub] = UpdatePlanner(3, 1, 10)
    assert planner.add(stubs([10] * 3)) == []
    [work] = planner.add(stubs([10]))
    assert isinstance(work, Accumulate)
    assert planner.add([]) == [OptimizerStep()]


@given(groups=st.lists(st.lists(lengths, min_size=1, max_size=6), min_size=1, max_size=30), budget=st.integers(60, 200))
def test_work_after_the_last_group_is_bounded(groups: list[list[int]], budget: int) -> None:
    planner: UpdatePlanner[Stub] = UpdatePlanner(len(groups) + 1, 1, budget)
    for sizes in groups:
        planner.add(stubs(sizes))
    [*last, step] = planner.add([])
    left = sum(row.n_tokens for work in last if isinstance(work, Accumulate) for rows in work.batches for row in rows)
    assert left < 4 * budget
    assert step == OptimizerStep()


def test_a_larger_step_is_cut_into_full_micro_batches() -> None:
    draw = random.Random(0)
    groups = [[draw.randint(12, 256) for _ in range(8)] for _ in range(64)]
    planner: UpdatePlanner[Stub] = UpdatePlanner(len(groups), 1, 2048)
    works = [work for sizes in groups for work in planner.add(stubs(sizes))]
    batches = [rows for work in works if isinstance(work, Accumulate) for rows in work.batches]
    assert 2048 * len(batches) < sum(map(sum, groups)) / 0.85
