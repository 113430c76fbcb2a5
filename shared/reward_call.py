"""How the field calls reward functions: TRL's way with a whole group, verl's with one completion."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "label")
"""Where a row holds what is right, after verl's own `reward_model.ground_truth`."""


class Unfit(TypeError):
    """A module that can be imported has no such function, or one that cannot be called as its kind is."""


def load(path: str) -> Callable[..., Any]:
    """Import `package.module:function`, which runs the user's code.

    Raises:
        Unfit: it is not there, or no function.
        Exception: whatever the user's code raises.

    """
    place, _, names = path.partition(":")
    found = importlib.import_module(place)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            near = difflib.get_close_matches(name, dir(found), 1)
            raise Unfit(f"{place} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")) from error
        place = f"{place}.{name}"
    if not callable(found):
        raise Unfit(f"it is of the type {type(found).__name__}")
    return found


def why_not(path: str, kind: str, error: BaseException) -> str:
    """Return, in one line, why the user's function cannot be had, and what to do.

    Args:
        path: where it is looked for.
        kind: what it is to be, such as `reward function`.
        error: what looking for it raised.

    """
    reason = " ".join(str(error).split())
    if isinstance(error, Unfit):
        return f"{path} is no {kind}: {reason}"
    module = path.partition(":")[0]
    told = f"{path} cannot be imported: {type(error).__name__}: {reason}"
    if not isinstance(error, ModuleNotFoundError):
        return f"{told}; mend {module}"
    if not f"{module}.".startswith(f"{error.name}."):
        return f"{told}; install it, or mend {module}"
    return (
        f"{told}, looked for from {Path.cwd()}; start the trainer in a folder from which 'import {module}' works, or "
        "add that folder to PYTHONPATH"
    )


def style_of(function: Callable[..., Any], arguments: Mapping[str, Any], style: str = "auto") -> str:
    """Return `trl` or `verl`: how a function is to be called.

    Args:
        function: anything that can be called.
        arguments: what the job file gives it by name.
        style: `auto`, or what it must be.

    Raises:
        Unfit: it cannot be called so; the text says what it takes and what to do.

    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some written in C have none
        return "trl" if style == "auto" else style
    takes = {name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if style == "auto":
        style = "verl" if "solution_str" in takes and "completions" not in takes else "trl"
    wanted = VERL_ARGUMENTS if style == "verl" else TRL_ARGUMENTS
    try:
        # A column that is required here may come with the data, so that only what is given can be too much.
        signature.bind_partial(**dict.fromkeys((*wanted, *arguments)))
    except TypeError as error:
        raise Unfit(
            f"it takes {signature}, which fits neither TRL's (prompts, completions, completion_ids, **columns) nor "
            f"verl's (data_source, solution_str, ground_truth, extra_info): {error}"
            if style == "trl" and takes.isdisjoint(TRL_ARGUMENTS)
            else f"it takes {signature}, but is called with {', '.join((*wanted, *arguments))}: {error}"
        ) from error
    return style


def ground_truth(row: Mapping[str, Any]) -> Any:
    """Return what is right, from a row of data: verl's `reward_model.ground_truth`, or one of `TRUTH_COLUMNS`.

    Raises:
        KeyError: it has none of them.

    """
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    for name in TRUTH_COLUMNS:
        if name in row:
            return row[name]
    raise KeyError(f"the data has no column reward_model.ground_truth, {', '.join(TRUTH_COLUMNS)}")
