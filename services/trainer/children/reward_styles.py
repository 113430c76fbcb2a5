"""Calls a user's reward function with TRL's or verl's signature."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rlboost.shared.user_code.reward_call import RAW_ARGUMENTS, TRL_ARGUMENTS, detect_style, ground_truth, has_parameter


class Caller(NamedTuple):
    """One reward function."""

    name: str
    """Empty if the job has only one."""
    call: Callable[[dict[str, Any]], Any]
    """A request, whose keys are the fields of `RewardBatch` -> its rewards, one per completion, or an awaitable of
    them."""
    number: Callable[[Any], float]
    """The function's result for one completion -> a number."""


def caller(function: Callable[..., Any], part: Mapping[str, Any]) -> Caller:
    """Return the caller of a function.

    Args:
        function: the user's.
        part: the fields of `RewardPart`.

    Raises:
        InvalidUserFunction: it has neither signature.

    """
    style = detect_style(function, part["arguments"], part["style"])
    bound = partial(function, **part["arguments"]) if part["arguments"] else function
    if style == "verl":
        return Caller(part["name"], lambda request: _verl(bound, request), _verl_number)
    names = [*TRL_ARGUMENTS, *(name for name in RAW_ARGUMENTS if has_parameter(function, name))]
    return Caller(
        part["name"], lambda request: bound(**{name: request[name] for name in names}, **request["columns"]), float
    )


def _verl(function: Callable[..., Any], request: dict[str, Any]) -> list[Any] | Awaitable[list[Any]]:
    rows = rows_of(request["columns"], len(request["solutions"]))
    results = [
        function(
            data_source=row.get("data_source"),
            solution_str=text,
            ground_truth=ground_truth(row),
            extra_info=row.get("extra_info") or {},
        )
        for row, text in zip(rows, request["solutions"], strict=True)
    ]
    if results and inspect.isawaitable(results[0]):
        return _together(results)
    return results


async def _together(results: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*results)


def _verl_number(value: Any) -> float:
    # A mapping may have further entries for logging.
    return float(value["score"] if isinstance(value, Mapping) else value)


def rows_of(columns: Mapping[str, list[Any]], n: int) -> list[dict[str, Any]]:
    """Return columns as `n` rows."""
    return [{name: values[i] for name, values in columns.items()} for i in range(n)]
