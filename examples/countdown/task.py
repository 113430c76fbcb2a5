"""Countdown: combine three digits, left to right, with `+`, `-` and `*`, to reach a target.

    prompt      3,8,4>44
    completion  <think>8*4=32*3=96 ✗ 4+8=12*3=36 ✗ 3+8=11*4=44 ✓</think>3+8=11*4=44<eos>

Each digit is used once, results stay within 0..99, targets are 10..99. Between the think tags stand *attempts*, each
followed by a verdict; after them comes the answer, one more attempt. Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import combinations_with_replacement, permutations, product
from random import Random
from typing import NamedTuple

MAX_DIGIT = 9
MAX_RESULT = 99
MIN_TARGET = 10
ALL_OPERATORS = "+-*"
RL_OPERATORS = "+*"
"""Targets of the reinforcement-learning problems come from these; that `-` is no help there is one thing to learn."""

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
THINK, END_THINK = "<think>", "</think>"
HIT, MISS = " ✓", " ✗ "
VOCABULARY_SIZE = 128
_USED = (PAD, BOS, EOS, THINK, END_THINK, *ALL_OPERATORS, "=", ",", ">", HIT, MISS, *map(str, range(MAX_RESULT + 1)))
VOCABULARY = (*_USED, *(f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(_USED))))
"""The text of each token, by token id. The verdicts carry their spaces, so that joining tokens gives the text back."""

_NUMBER = "(0|[1-9][0-9]?)"
_OPERATOR = "([-+*])"
_ATTEMPT = re.compile(f"{_NUMBER}{_OPERATOR}{_NUMBER}={_NUMBER}{_OPERATOR}{_NUMBER}={_NUMBER}")

_SLIP_PARTIAL = (-2, -1, 1, 2)
_SLIP_RESULT = (-10, -2, -1, 1, 2, 10)


class Problem(NamedTuple):
    """Three digits, in the order in which they are shown, and the number to reach."""

    numbers: tuple[int, int, int]
    target: int

    @property
    def prompt(self) -> str:
        """Return the text that the model is given, without `<bos>`."""
        return f"{','.join(map(str, self.numbers))}>{self.target}"

    @property
    def is_held_out(self) -> bool:
        """Say whether the problem is kept for evaluation: about one in ten, by a hash.

        The order of the digits does not count, so no reordering of a held-out problem is ever trained on.
        """
        key = f"({sorted(self.numbers)}, {self.target})"
        return hashlib.md5(key.encode(), usedforsecurity=False).digest()[0] < 26


class Attempt(NamedTuple):
    """A calculation as it is written, right or wrong: `first operator second=partial operator third=result`."""

    first: int
    first_operator: str
    second: int
    partial: int
    second_operator: str
    third: int
    result: int

    def __str__(self) -> str:
        first, first_operator, second, partial, second_operator, third, result = self
        return f"{first}{first_operator}{second}={partial}{second_operator}{third}={result}"

    @property
    def is_right(self) -> bool:
        """Say whether both steps hold and stay within 0..99."""
        return (
            calculate(self.first, self.first_operator, self.second) == self.partial
            and calculate(self.partial, self.second_operator, self.third) == self.result
        )

    def solves(self, problem: Problem) -> bool:
        """Say whether this is right, uses exactly the problem's digits and reaches its target."""
        digits = sorted((self.first, self.second, self.third))
        return self.is_right and digits == sorted(problem.numbers) and self.result == problem.target


def calculate(left: int, operator: str, right: int) -> int | None:
    """Return the result of one step, or None where it leaves 0..99."""
    match operator:
        case "+":
            result = left + right
        case "-":
            result = left - right
        case "*":
            result = left * right
        case _:
            raise ValueError(f"{operator!r} is not one of {ALL_OPERATORS}")
    return result if 0 <= result <= MAX_RESULT else None


def parse_attempt(text: str) -> Attempt | None:
    """Return the attempt that `text` is, or None if it is anything else."""
    found = _ATTEMPT.fullmatch(text)
    if found is None:
        return None
    first, first_operator, second, partial, second_operator, third, result = found.groups()
    return Attempt(int(first), first_operator, int(second), int(partial), second_operator, int(third), int(result))


def answer_of(completion: str) -> Attempt | None:
    """Return the answer of a whole completion, special tokens included, or None if it is not well formed.

    Well formed is `<think>`, anything without a further tag, `</think>`, one attempt, `<eos>`, and nothing else; a
    completion that was cut off lacks its `<eos>`.
    """
    if not completion.startswith(THINK) or not completion.endswith(EOS):
        return None
    thought, end_think, answer = completion[len(THINK) : -len(EOS)].partition(END_THINK)
    if not end_think or "<" in thought:
        return None
    return parse_attempt(answer)


def training_problems(rng: Random, operators: str) -> Iterator[Problem]:
    """Yield problems without end: random digits and a target that a random calculation reaches; none is held out."""
    while True:
        first, second, third = (rng.randint(1, MAX_DIGIT) for _ in range(3))
        target = _random_attempt((first, second, third), rng, operators).result
        problem = Problem((first, second, third), target)
        if target >= MIN_TARGET and not problem.is_held_out:
            yield problem


def all_problems(operators: str) -> list[Problem]:
    """Return every problem that `operators` can solve, once each with its digits in rising order."""
    return [
        Problem(numbers, target)
        for numbers in combinations_with_replacement(range(1, MAX_DIGIT + 1), 3)
        for target in sorted({attempt.result for attempt in _right_attempts(numbers, operators)})
        if target >= MIN_TARGET
    ]


def noisy_trace(
    problem: Problem,
    rng: Random,
    *,
    blurt_probability: float = 0.2,
    quit_probability: float = 0.3,
    slip_probability: float = 0.05,
    max_attempts: int = 20,
) -> str:
    """Return a completion in the right form without any skill at searching: what the warm-up imitates.

    Attempts are random and end at the first hit; some traces answer at once (blurt) or answer with a miss (quit), and
    some arithmetic slips. By construction about 22 % of the answers are right, the more the more attempts were made.
    """
    if rng.random() < blurt_probability:
        blurted = _slip(_random_attempt(problem.numbers, rng, ALL_OPERATORS), rng, slip_probability)
        return f"{THINK}{END_THINK}{blurted}{EOS}"
    thought = ""
    for _ in range(max_attempts):
        attempt = _slip(_random_attempt(problem.numbers, rng, ALL_OPERATORS), rng, slip_probability)
        hit = attempt.result == problem.target
        thought += f"{attempt}{HIT if hit else MISS}"
        if hit or rng.random() < quit_probability:
            break
    return f"{THINK}{thought}{END_THINK}{attempt}{EOS}"


def _random_attempt(numbers: tuple[int, int, int], rng: Random, operators: str) -> Attempt:
    while True:
        first, second, third = rng.sample(numbers, 3)
        first_operator, second_operator = rng.choices(operators, k=2)
        attempt = _carry_out(first, first_operator, second, second_operator, third)
        if attempt is not None:
            return attempt


def _right_attempts(numbers: tuple[int, int, int], operators: str) -> Iterator[Attempt]:
    for (first, second, third), (first_operator, second_operator) in product(
        permutations(numbers), product(operators, repeat=2)
    ):
        attempt = _carry_out(first, first_operator, second, second_operator, third)
        if attempt is not None:
            yield attempt


def _carry_out(first: int, first_operator: str, second: int, second_operator: str, third: int) -> Attempt | None:
    partial = calculate(first, first_operator, second)
    result = None if partial is None else calculate(partial, second_operator, third)
    if partial is None or result is None:
        return None
    return Attempt(first, first_operator, second, partial, second_operator, third, result)


def _slip(attempt: Attempt, rng: Random, probability: float) -> Attempt:
    """Return the attempt with each of its two results wrong by a little with `probability`."""
    if rng.random() < probability:
        partial = _clamp(attempt.partial + rng.choice(_SLIP_PARTIAL))
        carried = calculate(partial, attempt.second_operator, attempt.third)
        attempt = attempt._replace(partial=partial, result=attempt.result if carried is None else carried)
    if rng.random() < probability:
        attempt = attempt._replace(result=_clamp(attempt.result + rng.choice(_SLIP_RESULT)))
    return attempt


def _clamp(value: int) -> int:
    return min(MAX_RESULT, max(0, value))
