"""The parser behind math-verify, made to remember: what it parsed, and how it went through an expression of one form.

It is private parts of math-verify and latex2sympy2_extended that are changed, in this process alone. Where a version of
them lacks one that is needed, or has another kind of grammar, nothing is changed, and it is only slower.

Why no verdict changes: most of the time goes into `adaptivePredict`, which looks ahead to choose an alternative of the
grammar. ANTLR chooses by the kinds of tokens, such as letter, sign, number; by the rules that it is in, which follow
from its earlier choices; and by the grammar's predicates. Those of this one are all about precedence (`precpred`),
which follows from the rules, too; `_chooses_by_kinds` makes sure. So two expressions of the same kinds of tokens get
the same choices. All else is done anew for each: reading tokens, building the tree, and what sympy makes of it. What
has an error is never remembered. `tests/contract/test_math_reward.py` compares verdicts with the library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sympy import Integer

REMEMBERED = 1 << 14
"""Expressions, and forms of expressions."""
_LONGEST_FORM = 200
_INSTALLED = "_rlboost_remembers"

Form = tuple[int, ...]
"""The kinds of an expression's tokens."""


def install() -> bool:
    """Make the parser of this process remember; tell whether it does."""
    try:
        # Here, as another version may not have them.
        from latex2sympy2_extended.latex2sympy2 import PSParser, _Latex2Sympy  # noqa: PLC0415
        from math_verify import parser as math_verify_parser  # noqa: PLC0415

        if hasattr(_Latex2Sympy, _INSTALLED):
            return True
        # As it is, it remembers 20 expressions: what is right is forgotten before its group is scored.
        parse = lru_cache(maxsize=REMEMBERED)(math_verify_parser.parse_latex_cached.__wrapped__)
        create_parser = _remembering(_Latex2Sympy.create_parser)
        parse_number = _quick(_Latex2Sympy.parse_number)
        if not _chooses_by_kinds(PSParser):
            return False
        for _ in range(2):  # to record, and to follow
            create_parser(_Latex2Sympy, "x + 1").math()
    except (ImportError, AttributeError, TypeError):
        return False
    math_verify_parser.parse_latex_cached = parse
    _Latex2Sympy.create_parser, _Latex2Sympy.parse_number = create_parser, parse_number
    setattr(_Latex2Sympy, _INSTALLED, True)
    return True


def _chooses_by_kinds(parser: Any) -> bool:
    from antlr4.atn.Transition import Transition  # noqa: PLC0415 - like the rest of what is looked for

    edges = (edge for state in parser.atn.states if state is not None for edge in state.transitions)
    return all(edge.serializationType != Transition.PREDICATE for edge in edges)


def _remembering(create: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return what makes parsers that predict nothing twice."""
    known: dict[Form, list[int]] = {}

    def create_parser(self: Any, latex: str) -> Any:
        parser = create(self, latex)
        stream = parser.getTokenStream()
        stream.fill()
        form = tuple(token.type for token in stream.tokens if token.channel == stream.channel)
        if (choices := known.get(form)) is not None:
            following = iter(choices)
            parser._interp.adaptivePredict = lambda *_: next(following)  # noqa: SLF001 - it has no other name
        elif len(form) <= _LONGEST_FORM and len(known) < REMEMBERED:
            _record(parser, known, form)
        return parser

    return create_parser


def _record(parser: Any, known: dict[Form, list[int]], form: Form) -> None:
    """Let a parser tell its choices once it has come to the end: not where it finds an error, or time is up."""
    simulator, math = parser._interp, parser.math  # noqa: SLF001 - likewise
    predict = simulator.adaptivePredict
    choices: list[int] = []

    def recorded(*asked: Any) -> int:
        choices.append(predict(*asked))
        return choices[-1]

    def to_the_end() -> Any:
        tree = math()
        known[form] = choices
        return tree

    simulator.adaptivePredict, parser.math = recorded, to_the_end


def _quick(parse_number: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a `parse_number` that does not compile Python to read digits."""

    def read(self: Any, text: str) -> Any:
        if text.isascii() and text.isdecimal():
            return Integer(int(text))
        return parse_number(self, text)

    return read
