"""Who copies whose keys and values: each token of a common beginning is read once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain.frames import Prefill, plan

PROMPT = list(range(100, 130))


def read(new: list[list[int]], held: list[list[int]] | None = None) -> list[list[Prefill]]:
    """Plan for held rows 0.. and new rows behind them; check that each one gets its own tokens and no others."""
    held = held or []
    tokens = [np.array(row, np.int32) for row in held + new]
    turns = plan(list(enumerate(tokens))[len(held) :], list(enumerate(tokens))[: len(held)])
    ready = set(range(len(held)))
    for turn in turns:
        for one in turn:
            assert one.length == len(tokens[one.slot])
            assert one.shared <= one.length
            if one.shared:
                assert one.donor in ready
                assert tokens[one.donor][: one.shared].tolist() == tokens[one.slot][: one.shared].tolist()
        ready |= {one.slot for one in turn}
    assert ready >= {row for row, one in enumerate(tokens) if one.size}
    return turns


def n_read(turns: list[list[Prefill]]) -> int:
    return sum(one.length - one.shared for turn in turns for one in turn)


def test_prompt_of_a_group_is_prefilled_once() -> None:
    turns = read([PROMPT] * 8)
    assert n_read(turns) == len(PROMPT)
    assert [len(turn) for turn in turns] == [1, 7]


def test_resumed_samples_share_the_prompt_and_prefill_their_tokens() -> None:
    turns = read([[*PROMPT, 1, 2, 3], PROMPT, [*PROMPT, 4, 5]])
    assert n_read(turns) == len(PROMPT) + 3 + 2


def test_prefix_of_a_running_slot_is_copied() -> None:
    turns = read([PROMPT, [*PROMPT, 7]], held=[[9] * 40, [*PROMPT, 1, 2, 3]])
    assert n_read(turns) == 1
    assert len(turns) == 1


def test_donor_with_the_longest_common_prefix_is_copied() -> None:
    ((one,),) = read([[*PROMPT, 1, 2, 3, 4]], held=[[*PROMPT, 8], [*PROMPT, 1, 2, 3, 9], PROMPT])
    assert (one.donor, one.shared) == (1, len(PROMPT) + 3)


def test_a_few_tokens_in_common_are_not_worth_waiting_for() -> None:
    turns = read([[1, 2, *range(50, 80)], [1, 2, *range(10, 40)], [1, 2, 3]])
    assert [len(turn) for turn in turns] == [3]


def test_equal_short_prompts_are_prefilled_once_and_empty_ones_never() -> None:
    turns = read([[1, 2], [1, 2], [], []])
    assert n_read(turns) == 2
    assert sum(map(len, turns)) == 2


@given(st.data())
def test_plan_fills_every_slot_with_its_tokens_at_no_extra_cost(data: st.DataObject) -> None:
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
