"""Who copies whose keys and values: each token of a common beginning is read once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout_worker.domain.prefixes import Reading, plan

PROMPT = list(range(100, 130))


def read(new: list[list[int]], held: list[list[int]] | None = None) -> list[list[Reading]]:
    """Plan for held rows 0.. and new rows behind them; check that each one gets its own tokens and no others."""
    held = held or []
    tokens = [np.array(row, np.int32) for row in held + new]
    turns = plan(list(enumerate(tokens))[len(held) :], list(enumerate(tokens))[: len(held)])
    ready = set(range(len(held)))
    for turn in turns:
        for one in turn:
            assert one.length == len(tokens[one.row])
            assert one.shared <= one.length
            if one.shared:
                assert one.donor in ready
                assert tokens[one.donor][: one.shared].tolist() == tokens[one.row][: one.shared].tolist()
        ready |= {one.row for one in turn}
    assert ready >= {row for row, one in enumerate(tokens) if one.size}
    return turns


def n_read(turns: list[list[Reading]]) -> int:
    return sum(one.length - one.shared for turn in turns for one in turn)


def test_a_groups_prompt_is_read_once() -> None:
    turns = read([PROMPT] * 8)
    assert n_read(turns) == len(PROMPT)
    assert [len(turn) for turn in turns] == [1, 7]


def test_samples_that_go_on_share_their_prompt_and_read_their_own_tokens() -> None:
    turns = read([[*PROMPT, 1, 2, 3], PROMPT, [*PROMPT, 4, 5]])
    assert n_read(turns) == len(PROMPT) + 3 + 2


def test_what_a_running_row_has_is_read_by_nobody() -> None:
    turns = read([PROMPT, [*PROMPT, 7]], held=[[9] * 40, [*PROMPT, 1, 2, 3]])
    assert n_read(turns) == 1
    assert len(turns) == 1


def test_the_one_with_the_most_in_common_is_copied() -> None:
    ((one,),) = read([[*PROMPT, 1, 2, 3, 4]], held=[[*PROMPT, 8], [*PROMPT, 1, 2, 3, 9], PROMPT])
    assert (one.donor, one.shared) == (1, len(PROMPT) + 3)


def test_a_few_tokens_in_common_are_not_worth_waiting_for() -> None:
    turns = read([[1, 2, *range(50, 80)], [1, 2, *range(10, 40)], [1, 2, 3]])
    assert [len(turn) for turn in turns] == [3]


def test_short_prompts_that_are_equal_are_read_once_and_empty_ones_never() -> None:
    turns = read([[1, 2], [1, 2], [], []])
    assert n_read(turns) == 2
    assert sum(map(len, turns)) == 2


@given(st.data())
def test_whatever_comes_every_row_gets_its_own_tokens_and_never_reads_more_than_alone(data: st.DataObject) -> None:
    rows = st.lists(
        st.builds(
            lambda n, m, end: ([1] * n + [2] * m)[:60] + end,
            *[st.integers(0, 30)] * 2,
            st.lists(st.integers(0, 3), max_size=4),
        ),
        max_size=8,
    )
    new = data.draw(rows)
    assert n_read(read(new, data.draw(rows))) <= sum(map(len, new))
