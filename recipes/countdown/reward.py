"""The reward: 1 if the equation in the last `<answer>` reaches the target with exactly the given numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from typing import Any

FORM = 0.1
"""Reward of an answer that can be read but is wrong, as TinyZero gives it."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARACTERS = 200


def score(
    completions: list[str | list[dict[str, Any]]], *, nums: list[list[int]], target: list[int], **columns: object
) -> list[float]:
    """Return one reward per completion; `nums` and `target` are columns of the data."""
    return [
        _score(text if isinstance(text, str) else text[-1]["content"], given, right)
        for text, given, right in zip(completions, nums, target, strict=True)
    ]


def _score(text: str, nums: list[int], target: int) -> float:
    answers = _ANSWER.findall(text)
    equation = answers[-1].partition("=")[0].strip() if answers else ""
    if not equation or len(equation) > _MAX_CHARACTERS:
        return 0.0
    used = Counter[int]()
    try:
        value = _value(ast.parse(equation, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0.0
    return 1.0 if used == Counter(nums) and value == target else FORM


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    """Compute an equation of whole numbers, and count these."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            used[number] += 1
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return Fraction(_OPERATORS[type(op)](_value(left, used), _value(right, used)))
    raise ValueError(f"{ast.dump(node)} is no number, sum, difference, product or quotient")
