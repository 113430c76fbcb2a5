"""Tests of the reward: `python test_reward.py`, or pytest."""

from __future__ import annotations

from reward import score


def test_score_right_number_pays() -> None:
    completions = ["75", " 75", "75 is the sum", "750", "7", "", "sum: 75"]
    rewards = score(["27+48="] * 7, completions, [[]] * 7, answer=["75"] * 7)
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_score_end_token_does_not_matter() -> None:
    assert score(["27+48="], ["75<eos>"], [[]], answer=["75"]) == [1.0]


def test_score_answer_may_be_a_number_or_missing() -> None:
    assert score(["27+48="] * 2, ["75", "75"], [[]] * 2, answer=[75, None]) == [1.0, None]


if __name__ == "__main__":
    test_score_right_number_pays()
    test_score_end_token_does_not_matter()
    test_score_answer_may_be_a_number_or_missing()
    print("the reward is as expected")
