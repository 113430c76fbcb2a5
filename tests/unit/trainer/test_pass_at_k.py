from __future__ import annotations

from itertools import combinations

import pytest

from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.metrics import RolloutTally, StepTally, pass_at_k, pass_rates
from rlboost.shared.messages import SampleFinished
from rlboost.shared.wire import F32, I32, pack
from tests.support.jobs import held_out


@pytest.mark.parametrize(("n", "n_passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 6)])
def test_it_is_the_share_of_all_choices_of_k_in_which_one_passes(n: int, n_passed: int) -> None:
    outcomes = [i < n_passed for i in range(n)]
    for k in range(1, n + 1):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(n, n_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_beyond_the_completions_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from 3 completions"):
        pass_at_k(3, 1, k)


def test_problems_are_averaged_up_to_the_fewest_completions_of_one() -> None:
    problems = [[True, False, False, False], [False] * 5]
    assert pass_rates(problems) == {1: 0.125, 2: 0.25, 4: 0.5}
    assert pass_rates([]) == {}


def test_pass_at_k_depends_on_the_pass_reward() -> None:
    empty = SampleFinished(
        sample=1, tokens=pack([], I32), logprobs=pack([], F32), finish="stop", spans=[], attempts=1, group_done=False
    )
    sets = held_out(), held_out(name="lenient", pass_reward=0.5)
    groups = [
        ScoredGroup(1, (empty, empty), rewards, held_out=one) for one in sets for rewards in ((1.0, 0.5), (0.0, 0.5))
    ]
    tally = StepTally(rollouts=RolloutTally(evaluated=groups))
    assert {k: v for k, v in tally.metrics().items() if "@" in k} == {
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
        "eval/lenient/pass@1": 0.75,
        "eval/lenient/pass@2": 1.0,
    }
