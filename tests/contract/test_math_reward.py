"""Mathematics checked by math-verify: as a function, in a thread, and in the reward processes."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlboost.rewards.math import score
from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.ports import RewardBatch, Scores
from shared.reward import RewardSpec
from shared.waiting import Waits

SLOW = "$9^{9^{9^{9}}}$"
"""sympy tries to write the number out."""


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
def test_an_answer_is_right_when_it_equals_what_is_right(completion: str, truth: str, reward: float | None) -> None:
    assert score([completion], answer=[truth]) == [reward]


def test_chat_messages_and_verls_columns_are_understood() -> None:
    chats = [[{"role": "assistant", "content": rf"\boxed{{{n}}}"}] for n in (3, 4, 4)]
    assert score(chats, reward_model=[{"ground_truth": "4"}] * 3) == [0.0, 1.0, 1.0]
    with pytest.raises(KeyError, match=r"reward_model\.ground_truth"):
        score(chats, target=["4"] * 3)


def test_it_works_off_the_main_thread_where_signals_do_not() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score, [r"\boxed{2}", r"\boxed{3}"], answer=["2", "2"]).result(30) == [1.0, 0.0]


async def test_an_answer_that_takes_for_ever_is_wrong_and_the_group_is_scored() -> None:
    pool = RewardPool(RewardSpec(function="rlboost.rewards.math:score", timeout_s=20), Waits())
    await pool.start()
    try:
        began = time.monotonic()
        batch = RewardBatch(["?"] * 2, [SLOW, r"\boxed{4}"], [[1]] * 2, {"answer": ["4"] * 2})
        assert await pool.score(batch) == Scores((0.0, 1.0))
        assert time.monotonic() - began < 15
    finally:
        await pool.close()


def test_without_the_library_it_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['math_verify'] = None; import rlboost.rewards.math"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'rlboost[math]'" in done.stderr
