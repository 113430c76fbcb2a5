from __future__ import annotations

import pytest

from rlboost import follow


def wait(for_: str, because: str = "so") -> dict[str, str]:
    return {"for": for_, "because": because}


def test_a_long_wait_is_reported_once() -> None:
    waits = follow._LongWaits()
    told = [
        waits.is_news(wait_now, now)
        for now, wait_now in [
            (0.0, wait("samples", "0 of 8 are there")),
            (4.9, wait("samples", "7 of 8 are there")),
            (5.0, wait("samples", "7 of 8 are there")),
            (9.0, wait("samples", "7 of 8 are there")),
            (10.0, None),
            (16.0, wait("samples")),
            (17.0, wait("a worker")),
            (22.0, wait("a worker")),
        ]
    ]
    assert told == [False, False, True, False, False, False, False, True]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (0, "step    1/3  reward/mean 0.125  eval/reward 0.5"),
        (3, "after the last step  reward/mean 0.125  eval/reward 0.5"),
    ],
)
def test_a_step_is_one_line_of_what_people_look_at_first(step: int, line: str) -> None:
    row = {"step": step, "grad_norm": 9.0, "eval/reward": 0.5, "reward/mean": 0.125}
    assert follow.step_line(row, 3) == line
