"""Mathematics checked by math-verify: as a function, in a thread, and in the reward processes."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from math_verify import parse as library_parse

from rlboost.rewards import math
from rlboost.rewards.math import score
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits

SLOW = "$9^{9^{9^{9}}}$"
"""sympy tries to expand the number."""


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 42.<eos>", "42", 1.0),
        (r"$x = 3$, no, \boxed{5}", "3", 0.0),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
        (r"\boxed{1}", "", None),
    ],
)
def test_an_answer_that_equals_the_ground_truth_is_rewarded(completion: str, truth: str, reward: float | None) -> None:
    assert score([completion], answer=[truth]) == [reward]


@pytest.mark.parametrize(
    "truth",
    [None, float("nan"), float("inf"), ["72"], {"value": "72"}, True, False, "", " \n", "$$", "proof", "notfound"],
)
def test_ground_truth_that_is_no_answer_is_missing_and_named(truth: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert score([r"\boxed{72}", "1", f"\\boxed{{{truth}}}"], answer=[truth] * 3) == [None, None, None]
    assert score([r"\boxed{72}"], reward_model=[{"ground_truth": truth}], answer=["72"]) == [None]
    assert score([r"\boxed{72}"] * 2, answer=["72", truth]) == [1.0, None]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # once for each call
    assert f"no reward: the ground truth {truth!r}" in lines[0]


@pytest.mark.parametrize(
    ("truth", "completion"),
    [
        (72, r"\boxed{72}"),
        (72.0, r"\boxed{72}"),
        ("72.0", r"\boxed{72}"),
        (" 72 ", r"\boxed{72}"),
        ("x #### 72", r"\boxed{72}"),
        ("He pays $<<5*3=15>>15, in \\boxed{3} bills.\n#### 72", r"\boxed{72}"),
        ("1,000", r"\boxed{1000}"),
        ("1e6", r"\boxed{1000000}"),
        (" -2.5E-3 ", r"\boxed{-0.0025}"),
        ("\N{MINUS SIGN}5", r"\boxed{-5}"),
        (-5, r"\boxed{-5}"),
        (1e-7, r"\boxed{0.0000001}"),
        (1e20, r"\boxed{100000000000000000000}"),
        (-0.0, r"\boxed{0}"),
        (2**63, r"\boxed{9223372036854775808}"),
    ],
)
def test_ground_truth_of_each_form_is_recognized(truth: object, completion: str) -> None:
    assert score([completion, r"\boxed{7}"], answer=[truth] * 2) == [1.0, 0.0]


def test_math_reward_reads_chat_messages_and_verl_columns() -> None:
    chats = [[{"role": "assistant", "content": rf"\boxed{{{n}}}"}] for n in (3, 4, 4)]
    assert score(chats, reward_model=[{"ground_truth": "4"}] * 3) == [0.0, 1.0, 1.0]
    with pytest.raises(KeyError, match=r"reward_model\.ground_truth"):
        score(chats, target=["4"] * 3)


def test_score_works_off_the_main_thread_without_signals() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score, [r"\boxed{2}", r"\boxed{3}"], answer=["2", "2"]).result(30) == [1.0, 0.0]


async def test_an_answer_over_the_limit_is_wrong_and_its_group_is_scored() -> None:
    pool = RewardPool(RewardSpec(function="rlboost.rewards.math:score", timeout_s=20), Waits())
    await pool.start()
    try:
        began = time.monotonic()
        batch = RewardBatch(["?"] * 2, [SLOW, r"\boxed{4}"], [[1]] * 2, {"answer": ["4"] * 2})
        assert await pool.score(batch) == Scores((0.0, 1.0))
        assert time.monotonic() - began < 15
    finally:
        await pool.close()


def test_math_reward_compares_the_meaning_of_answers() -> None:
    assert score(["$0.5$", r"$0.5$\%"], answer=["0.005"] * 2) == [0.0, 1.0]
    # A tuple has an order, a set has none.
    assert score(["(2, 1)", r"\boxed{\{2, 1\}}"], answer=["(1, 2)", r"\{1, 2\}"]) == [0.0, 1.0]


def test_a_ground_truth_is_parsed_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str, parsing_timeout: int | None) -> list[Any]:
        parsed.append(text)
        found: list[Any] = library_parse(text, parsing_timeout=parsing_timeout)
        return found

    monkeypatch.setattr(math, "parse", parse)
    assert score([r"\boxed{8123}"] * 3, answer=["8123"] * 3) == [1.0] * 3
    assert parsed.count(r"\boxed{8123}") == 1 + 3


def test_a_ground_truth_that_was_not_parsed_in_time_is_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[list[Any]] = [[], [7, "7"], [7, "7"]]
    monkeypatch.setattr(math, "parse", lambda *_, **__: results.pop(0))
    assert score(["7"], answer=["07007"]) == [None]
    assert len(results) == 2
    assert score(["7"], answer=["07007"]) != [None]


def test_a_missing_library_names_the_extra_to_install() -> None:
    code = "import sys; sys.modules['math_verify'] = None; import rlboost.rewards.math"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install -c constraints.txt -e '.[math]'" in done.stderr
