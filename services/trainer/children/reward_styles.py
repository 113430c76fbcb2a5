"""A user's reward function behind one call, whichever signature it has."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from shared.reward_call import ground_truth, style_of


class Caller(NamedTuple):
    """One reward function."""

    name: str
    """Empty for a job's only one."""
    call: Callable[[dict[str, Any]], Any]
    """From a request, whose keys are the fields of `RewardBatch`, to its rewards, one a completion, or to something to
    wait for that becomes them."""
    number: Callable[[Any], float]
    """From what it says of one completion to a number."""


def caller(function: Callable[..., Any], part: Mapping[str, Any]) -> Caller:
    """Return how to call a function.

    Args:
        function: the user's.
        part: the fields of `RewardPart`.

    Raises:
        Unfit: it has neither signature.

    """
    style = style_of(function, part["arguments"], part["style"])
    bound = partial(function, **part["arguments"]) if part["arguments"] else function
    if style == "verl":
        return Caller(part["name"], lambda request: _verl(bound, request), _verl_number)
    return Caller(part["name"], lambda request: _trl(bound, request), float)


def _trl(function: Callable[..., Any], request: dict[str, Any]) -> Any:
    return function(
        prompts=request["prompts"],
        completions=request["completions"],
        completion_ids=request["completion_ids"],
        **request["columns"],
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
    # A mapping holds what is to be logged beside the score.
    return float(value["score"] if isinstance(value, Mapping) else value)


def rows_of(columns: Mapping[str, list[Any]], n: int) -> list[dict[str, Any]]:
    """Return columns as `n` rows."""
    return [{name: values[i] for name, values in columns.items()} for i in range(n)]
