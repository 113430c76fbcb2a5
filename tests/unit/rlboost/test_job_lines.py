from __future__ import annotations

import pytest

from rlboost.job_lines import dollars


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (None, "-"),
        (0.0, "$0.00"),
        (1e-7, "< $0.000001"),
        (3e-5, "$0.000030"),
        (0.0996, "$0.10"),
        (0.125, "$0.13"),
        (0.994, "$0.99"),
        (0.996, "$1.00"),
        (12.345, "$12.35"),
        (12.344, "$12.34"),
        (1234567.125, "$1234567.13"),
    ],
)
def test_dollars_have_no_exponent_and_round_ties_up(amount: float | None, text: str) -> None:
    assert dollars(amount) == text
