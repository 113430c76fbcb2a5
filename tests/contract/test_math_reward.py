"""Mathematics checked by math-verify: as a function, in a thread, and in the reward processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from antlr4.atn.ATNState import ATNState
from antlr4.atn.Transition import PredicateTransition
from latex2sympy2_extended import latex2sympy2
from math_verify import parser as math_verify_parser

from rlboost.rewards import math_answers, math_parser
from rlboost.rewards.math import score
from rlboost.rewards.math_answers import read
from rlboost.rewards.math_difference import certainly_differ
from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.ports import RewardBatch, Scores
from shared.reward import RewardSpec
from shared.waiting import Waits
from tests.support.math_answers import pair

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


def plain(pairs: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return what the library says, of which nothing was changed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.plain_math_verify"],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        check=True,
    )
    return [None if verdict is None else float(verdict) for verdict in json.loads(done.stdout)]


@pytest.mark.filterwarnings("ignore::sympy.utilities.exceptions.SymPyDeprecationWarning")
def test_no_verdict_is_another_than_that_of_the_library_as_it_is() -> None:
    random = Random(3)
    pairs = [pair(random) for _ in range(150)]
    expected = plain(pairs)
    assert {*expected} == {0.0, 1.0, None}
    for _ in range(2):  # then from memory
        found = [score([completion], answer=[gold], limit_s=10)[0] for gold, completion in pairs]
        assert [(*pair, got) for pair, got in zip(pairs, found, strict=True)] == [
            (*pair, wanted) for pair, wanted in zip(pairs, expected, strict=True)
        ]


def without_its_wrapped_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify_parser, "parse_latex_cached", math_verify_parser.parse_latex_cached.__wrapped__)


def without_its_parse_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(latex2sympy2._Latex2Sympy, "parse_number")


def with_a_parser_that_predicts_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    create = latex2sympy2._Latex2Sympy.create_parser

    def create_parser(self: Any, latex: str) -> Any:
        parser = create(self, latex)
        del parser._interp
        return parser

    monkeypatch.setattr(latex2sympy2._Latex2Sympy, "create_parser", create_parser)


def with_a_grammar_that_asks_more_than_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ATNState()
    state.transitions = [PredicateTransition(state, 0, 0, False)]
    monkeypatch.setattr(latex2sympy2.PSParser, "atn", SimpleNamespace(states=[None, state]))


@pytest.mark.parametrize(
    "changed",
    [
        without_its_wrapped_parser,
        without_its_parse_number,
        with_a_parser_that_predicts_otherwise,
        with_a_grammar_that_asks_more_than_precedence,
    ],
)
def test_a_library_that_is_not_as_we_know_it_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[pytest.MonkeyPatch], None]
) -> None:
    def parts() -> list[Any]:
        names = ("create_parser", "parse_number", math_parser._INSTALLED)
        found = [getattr(latex2sympy2._Latex2Sympy, name, None) for name in names]
        return [math_verify_parser.parse_latex_cached, *found]

    assert math_parser.install()
    monkeypatch.delattr(latex2sympy2._Latex2Sympy, math_parser._INSTALLED)
    changed(monkeypatch)
    before = parts()
    assert not math_parser.install()
    assert parts() == before


def test_rewards_are_the_same_where_the_library_was_left_as_it_is() -> None:
    code = """
from math_verify import parser
parser.parse_latex_cached = parser.parse_latex_cached.__wrapped__
from rlboost.rewards import math, math_parser
assert not math_parser.install()
print(math.score([r"\\boxed{2x + 1}", "$1 + 2x$", "$1 + 3x$"], answer=["2x + 1"] * 3, limit_s=10))
"""
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[1.0, 1.0, 0.0]\n", done.stderr


def test_answers_of_one_text_that_are_not_one_answer_are_told_apart() -> None:
    group = ["$0.5$", r"$0.5$\%", r"\boxed{0.005} or \boxed{??}", r"\boxed{4} or \boxed{??}"]
    expected = plain([(r"\boxed{0.005}", completion) for completion in group])
    assert expected[:2] == [0.0, 1.0]
    assert score(group, answer=["0.005"] * 4) == expected
    # A set, and a tuple whose order counts: sympy finds both equal to one another.
    pairs = [("$(1, 2)$", rf"\boxed{{{given}}}") for given in ("1, 2", "2, 1", r"\{2, 1\}", "(1, 2)", "(2, 1)")]
    assert score([given for _, given in pairs], answer=["(1, 2)"] * len(pairs)) == plain(
        [(r"\boxed{(1, 2)}", given) for _, given in pairs]
    )


@pytest.mark.parametrize(
    ("gold", "given", "differ"),
    [
        ("x^2 + 5x - 7", "x^2 + 6x - 7", True),
        (r"2\sqrt{3}", r"3\sqrt{2}", True),
        (r"\frac{x+1}{x-1}", r"\frac{x+1}{x-2}", True),
        (r"\sin(2x)", r"2\sin x", True),
        ("x^2 - 4", "(x-2)(x+2)", False),
        (r"2\sqrt{3}", r"\sqrt{12}", False),
        (r"\sqrt{x^2}", "x + 0", False),  # equal where x is positive, which is not for us to judge
        (r"\sqrt{x - 7} + 1", r"\sqrt{x - 8} + 1", False),  # complex at our point
        (r"\frac{1}{1000000}", r"\frac{1}{1000001}", False),  # too near
        ("10^{12}", "10^{13}", False),  # too large
        ("0.333333", r"\frac{1}{3}", False),  # what math-verify rounds
        (r"50\%", "50", False),
        ("9", r"9\%", False),
        ("xyz", r"\text{xyz}", False),
        ("x = 3", "3", False),
        (r"\{1, 2\}", r"\{1, 3\}", False),
        (r"\frac{1}{x - x}", "2 + x", False),
        ("i + 2", "i + 3", False),  # no real number
    ],
)
def test_only_what_certainly_differs_is_not_shown_to_the_library(gold: str, given: str, differ: bool) -> None:
    answers = [read(rf"\boxed{{{one}}}", 10) for one in (gold, given)]
    assert answers[0]
    assert answers[1]
    assert certainly_differ(answers[0].found, answers[1].found) is differ
    assert certainly_differ(answers[1].found, answers[0].found) is differ


def test_what_was_compared_is_not_compared_again_and_what_took_too_long_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def verify(gold: Any, answer: Any, timeout_seconds: int) -> bool:
        asked.append(answer)
        return False

    monkeypatch.setattr(math_answers, "verify", verify)
    for _ in range(2):
        assert score([r"\boxed{8123.5}"] * 3, answer=["8124.5"] * 3) == [0.0] * 3
    assert len(asked) == 1
    clock = iter(range(0, 100, 5))
    monkeypatch.setattr(math_answers.time, "monotonic", lambda: next(clock))
    for _ in range(2):
        assert score([r"\boxed{8125.5}"] * 3, answer=["8126.5"] * 3) == [0.0] * 3
    assert len(asked) == 3  # once for each group


def test_what_could_not_be_read_in_time_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Any]] = [[], [7, "7"], [7, "7"]]
    monkeypatch.setattr(math_answers, "parse", lambda *_, **__: found.pop(0))
    assert score(["7"], answer=["07007"]) == [None]
    assert len(found) == 2
    assert score(["7"], answer=["07007"]) != [None]


def test_without_the_library_it_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['math_verify'] = None; import rlboost.rewards.math"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'rlboost[math]'" in done.stderr
