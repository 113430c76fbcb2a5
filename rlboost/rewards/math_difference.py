"""When two expressions certainly differ, without sympy's simplification, which takes milliseconds to find no way."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from mpmath import iv
from sympy import Add, Basic, Integer, MatrixBase, Mul, Pow, Rational, S, Symbol, cos, exp, log, sin, tan

_LARGEST = 10**9
"""Of all values on the way. So math-verify's 15 digits, too, are far more exact than `_GAP`."""
_GAP = 1e-3
_LARGEST_POWER = 64
_POINTS = 1000
_CONSTANTS = {S.Pi: iv.pi, S.Exp1: iv.e}


class _Unknown(Exception):
    """Its value is not known with certainty."""


def certainly_differ(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Tell whether `math_verify.verify` is bound to find no pair equal; False says nothing.

    Two expressions of numbers, real symbols, sums, products, powers and some functions are taken at one point with
    positive coordinates, in interval arithmetic, so that no rounding makes a difference. Where they have different
    values, no transformation makes one of the other. Whatever math-verify compares in ways of its own (decimal numbers,
    per cents, single symbols, sets, equations) is left to it.
    """
    return all(_pair_differs(a, b) for a, b in product(gold, answer))


def _pair_differs(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a.strip() != b.strip()
    if isinstance(a, str) or isinstance(b, str):
        return True  # math-verify compares no text with an expression
    if isinstance(a, MatrixBase | Symbol) or isinstance(b, MatrixBase | Symbol):
        return False
    try:
        gap = _value(a) - _value(b)
    except (_Unknown, ArithmeticError, ValueError, RecursionError):
        return False
    return bool(gap.a > _GAP or gap.b < -_GAP)


def _value(node: Basic) -> Any:
    """Return an interval in which the value of an expression is at our point."""
    if isinstance(node, Symbol):
        value = _coordinate(node)
    elif isinstance(node, Rational):
        value = iv.mpf(node.p) / node.q
    elif node in _CONSTANTS:
        value = +_CONSTANTS[node]
    elif (of_args := _OF_ARGUMENTS.get(type(node))) is not None:
        value = of_args(*node.args)
    else:
        raise _Unknown
    if not (value.a > -_LARGEST and value.b < _LARGEST):
        raise _Unknown
    return value


def _coordinate(symbol: Symbol) -> Any:
    if not symbol.is_real:
        raise _Unknown
    # The same for a name everywhere: in both expressions, and in every process.
    return iv.mpf(0.5 + zlib.crc32(symbol.name.encode()) % _POINTS / _POINTS)


def _sum(*terms: Basic) -> Any:
    return sum(map(_value, terms), iv.mpf(0))


def _product(*factors: Basic) -> Any:
    value = iv.mpf(1)
    for factor in factors:
        value *= _value(factor)
    return value


def _power(base: Basic, exponent: Basic) -> Any:
    if isinstance(exponent, Integer):
        if abs(exponent.p) > _LARGEST_POWER:
            raise _Unknown
        return _value(base) ** exponent.p
    return _positive(base) ** _value(exponent)


def _positive(node: Basic) -> Any:
    value = _value(node)
    if not value.a > 0:
        raise _Unknown  # complex
    return value


def _log(argument: Basic, base: Basic = S.Exp1) -> Any:
    return iv.log(_positive(argument)) / (iv.mpf(1) if base is S.Exp1 else iv.log(_positive(base)))


_OF_ARGUMENTS: dict[type[Basic], Callable[..., Any]] = {
    Add: _sum,
    Mul: _product,
    Pow: _power,
    log: _log,
    exp: lambda argument: iv.exp(_value(argument)),
    sin: lambda argument: iv.sin(_value(argument)),
    cos: lambda argument: iv.cos(_value(argument)),
    tan: lambda argument: iv.tan(_value(argument)),
}
