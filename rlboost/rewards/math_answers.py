"""Answers as math-verify reads and compares them, each pair once."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from sympy import Basic, MatrixBase

from rlboost.rewards import math_parser
from rlboost.rewards.math_difference import certainly_differ

math_parser.install()

_USUAL = (
    "7",
    "1.5",
    r"\frac{1}{2}",
    r"2\sqrt{3}",
    "x^2 + 5x - 7",
    r"\frac{x + 1}{x - 1}",
    "(1, 2)",
    r"[1, \infty)",
    "y = 3x + 2",
    r"\{1, 2\}",
    r"2\pi",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read in a text."""

    found: tuple[Any, ...] = field(compare=False)
    """An expression, and the text that it is of; or one of them."""
    key: Hashable
    """Equal for what math-verify cannot tell apart."""


class _Late(Exception):
    """The time limit may have decided."""

    def __init__(self, verdict: bool) -> None:
        super().__init__()
        self.verdict = verdict


@lru_cache(maxsize=2)
def warm(limit_s: int | None) -> None:
    """Read and compare once what answers look like, under a long limit.

    The first expressions of a form take a hundred times as long as later ones. On a busy machine that is longer than
    the usual limit, and what is right would be called wrong.
    """
    usual = [parse(rf"\boxed{{{latex}}}", parsing_timeout=limit_s) for latex in _USUAL]
    for answer in usual:
        verify(usual[-1], answer, timeout_seconds=limit_s)


def read(text: str, limit_s: int | None) -> Answer | None:
    """Return the answer in a text, None where there is none or it takes longer than the limit."""
    found = tuple(parse(text, parsing_timeout=limit_s))
    return Answer(found, _key(found)) if found else None


def equal(gold: Answer, answer: Answer, limit_s: int | None) -> bool:
    """Tell whether an answer equals what is right; not where finding out takes longer than the limit."""
    try:
        return _equal(gold, answer, limit_s)
    except _Late as late:
        return late.verdict


@lru_cache(maxsize=math_parser.REMEMBERED)
def _equal(gold: Answer, answer: Answer, limit_s: int | None) -> bool:
    if certainly_differ(gold.found, answer.found):
        return False
    began = time.monotonic()
    verdict = bool(verify(list(gold.found), list(answer.found), timeout_seconds=limit_s))
    if limit_s is not None and time.monotonic() - began >= limit_s:
        # Nothing is remembered of an exception: another time the machine may be less busy.
        raise _Late(verdict)
    return verdict


def _key(found: tuple[Any, ...]) -> Hashable:
    try:
        return tuple(map(_structure, found))
    except (TypeError, RecursionError):
        return object()  # equal to nothing else


def _structure(node: Any) -> Hashable:
    """Return all that makes an expression: with the order in which it was written, which `==` of sympy overlooks."""
    if isinstance(node, str):
        return node
    if isinstance(node, MatrixBase):
        return type(node), node.shape, tuple(map(_structure, node.flat()))
    if not isinstance(node, Basic):
        raise TypeError(type(node))
    args = getattr(node, "_unsorted_args", None) or node.args
    return type(node), tuple(map(_structure, args)) if args else node
