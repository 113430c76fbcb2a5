"""Reward functions as TRL's and verl's users wrote them, alone and several with weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.children.reward import Caller, rewards_of
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.user_code import TRUTH_COLUMNS

FUNCTIONS = "tests.support.reward_functions"
VERL_ROW: dict[str, Any] = {
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}
Start = Callable[..., Awaitable[RewardPool]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(**reward: Any) -> RewardPool:
            pool = RewardPool(RewardSpec.model_validate(reward), Waits())
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


def batch(prompt: str = "good", **columns: Any) -> RewardBatch:
    listed = {name: [value] * 2 for name, value in columns.items()}
    texts = ["4", "5"]
    return RewardBatch([prompt] * 2, [*texts], [[4, 2], [5, 2]], listed, texts, ["4<eos>", "5"])


def part(function: str, **more: Any) -> dict[str, Any]:
    return {"function": f"{FUNCTIONS}:{function}", **more}


async def test_verl_reward_function_is_detected_and_gets_verl_columns(start: Start) -> None:
    pool = await start(**part("compute_score"))
    assert await pool.score(batch(**VERL_ROW)) == Scores((1.0, 0.0))


@pytest.mark.parametrize("column", TRUTH_COLUMNS)
async def test_async_verl_function_gets_the_ground_truth_from_plain_columns(start: Start, column: str) -> None:
    pool = await start(**part("compute_later"))
    assert await pool.score(batch(**{column: "5"})) == Scores((0.0, 1.0))


async def test_ground_truth_is_the_first_column_with_a_value(start: Start) -> None:
    """Tables of several sources have a null where a row's source lacks the column."""
    pool = await start(**part("compute_later"))
    assert await pool.score(batch(ground_truth=None, answer="5", solution=None)) == Scores((0.0, 1.0))
    assert await pool.score(batch(ground_truth=None, answer=None)) == Scores((0.0, 0.0))


async def test_row_without_a_ground_truth_gives_the_reason(start: Start) -> None:
    pool = await start(**part("compute_later"))
    scores = await pool.score(batch(target="5"))
    assert (scores.rewards, scores.reason) == (None, "raised")
    assert "reward_model.ground_truth" in scores.detail


async def test_the_job_files_arguments_reach_the_function(start: Start) -> None:
    pool = await start(**part("compute_with_options", arguments={"factor": 3}))
    assert await pool.score(batch(answer="")) == Scores((3.0, 3.0))


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (part("of_nobody"), r"of_nobody .*fits neither TRL's .* nor verl's"),
        (part("of_trl"), r"of_trl .*RLBoost does not pass log_metric, as TRL's trainer does"),
        (part("compute_score", style="trl"), "fits neither"),
        (part("of_nobody", style="verl"), "is called with data_source"),
        (part("of_completions_only"), r"unexpected keyword argument 'prompts'; add \*\*columns, which takes what"),
    ],
)
async def test_a_function_that_cannot_be_called_is_refused_before_anything_is_generated(
    start: Start, reward: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await start(**reward)


async def test_score_passes_raw_completions_to_a_function_that_names_them(start: Start) -> None:
    pool = await start(**part("ended"))
    assert await pool.score(batch()) == Scores((1.0, 0.0))


async def test_rewards_of_several_functions_are_weighted_and_kept_apart(start: Start) -> None:
    pool = await start(
        functions=[
            part("compute_score", weight=2.0, name="right"),
            part("mixed", weight=0.5),
            part("later", weight=0.0, name="seen"),
        ]
    )
    scores = await pool.score(batch(**VERL_ROW))
    assert scores.rewards == (2.0 * 1 + 0.5 * 1, 0.5 * 1)
    assert scores.parts == {"right": (1.0, 0.0), "mixed": (1.0, 1.0), "seen": (0.5, 0.5)}


async def test_costs_are_summed_without_weights_and_kept_apart(start: Start) -> None:
    pool = await start(functions=[part("priced", weight=2.0), part("priced_like_verl", name="verl", weight=0.0)])
    scores = await pool.score(batch(cost=0.5, **VERL_ROW))
    assert (scores.rewards, scores.costs) == ((2.0, 1.0), (0.75, 0.25))
    assert scores.parts == {"priced": (1.0, 0.5), "verl": (1.0, 0.0)}


@pytest.mark.parametrize("cost", [-0.5, "0.5", float("inf"), 1e16, [1]])
async def test_cost_that_is_no_finite_number_from_0_drops_the_group(start: Start, cost: Any) -> None:
    pool = await start(**part("priced"))
    scores = await pool.score(batch(cost=cost))
    assert (scores.rewards, scores.reason) == (None, "not_a_number")
    assert f"the cost is {cost!r}: give a finite number from 0" in scores.detail


async def test_a_function_that_does_not_apply_is_left_out_of_the_sum(start: Start) -> None:
    pool = await start(functions=[part("only_first"), part("later", weight=2.0)])
    assert (await pool.score(batch())).rewards == (1.0 + 2 * 0.5, 2 * 0.5)


async def test_a_completion_to_which_no_function_applies_has_no_reward(start: Start) -> None:
    pool = await start(functions=[part("only_first"), part("never")])
    scores = await pool.score(batch())
    assert (scores.rewards, scores.reason) == (None, "missing")
    assert "completion 1" in scores.detail
    assert scores.parts == {"only_first": (1.0, None), "never": (None, None)}


@pytest.mark.parametrize(
    ("prompt", "reason", "detail"),
    [
        ("raise", "raised", "mixed: ValueError"),
        ("short", "wrong_length", "mixed: 1 rewards for 2"),
        ("nan", "not_a_number", "mixed: "),
    ],
)
async def test_the_function_that_failed_is_named(start: Start, prompt: str, reason: str, detail: str) -> None:
    pool = await start(functions=[part("later"), part("mixed")])
    scores = await pool.score(batch(prompt))
    assert (scores.rewards, scores.reason) == (None, reason)
    assert scores.detail.startswith(detail)


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ({}, "give either function, or functions"),
        ({"function": "m:f", "functions": [{"function": "m:f"}]}, "give either function, or functions"),
        ({"functions": [{"function": "m:f"}, {"function": "n:f"}]}, "two functions are called 'f': give each a name"),
        ({"functions": [{"function": "m:f"}], "style": "verl"}, "belong to each of functions"),
        ({"functions": [{"function": "f"}]}, "not of the form package.module:function"),
        ({"functions": []}, "at least 1"),
        ({"model": "m", "url": "http://h/"}, "give either function, or functions"),
        ({"functions": [{"model": "m", "function": "m:f"}]}, "give either function, url, model or judge"),
        ({"functions": [{"model": "m", "arguments": {"a": 1}}]}, "style and arguments are for a function"),
        ({"functions": [{"model": "m"}, {"model": "n"}]}, "two functions are called 'model': give each a name"),
    ],
)
def test_reward_section_with_missing_or_excess_keys_is_refused(reward: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RewardSpec.model_validate(reward)


def test_error_of_the_function_in_a_generator_is_its_own() -> None:
    def rewards() -> Iterator[float]:
        yield 1.0
        raise ValueError("no such answer")

    with pytest.raises(ValueError, match=r"^no such answer$"):
        rewards_of(rewards(), Caller("f", "f", lambda _: None))
