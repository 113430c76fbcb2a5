"""Reward functions of users: importing them, and the calling conventions of TRL and verl.

TRL calls a function with a whole group, verl with one completion.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlboost.shared.user_code.allowed import ForbiddenFunction, check_function, check_module
from rlboost.shared.user_code.errors import place_of

TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
RAW_ARGUMENTS = ("completions_raw",)
"""Ours, for functions of TRL's signature that have such a parameter: the completions with special tokens."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "label")
"""Columns that may hold the ground truth, besides verl's `reward_model.ground_truth`."""


class InvalidUserFunction(TypeError):
    """A module has no such function, or the function has the wrong signature."""


def load(path: str) -> Callable[..., Any]:
    """Import and return `package.module:function`; this runs the user's code.

    Raises:
        ForbiddenFunction: a job file may not name it; nothing was imported.
        InvalidUserFunction: it does not exist, or is not callable.
        Exception: whatever the user's code raises.

    """
    place, _, names = path.partition(":")
    check_module(place)
    found = importlib.import_module(place)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            similar = difflib.get_close_matches(name, dir(found), 1)
            raise InvalidUserFunction(
                f"{place} has no {name!r}" + (f"; did you mean {similar[0]!r}?" if similar else "")
            ) from error
        place = f"{place}.{name}"
    if not callable(found):
        raise InvalidUserFunction(f"it is of the type {type(found).__name__}")
    check_function(path, found)
    return found


def describe_import_error(path: str, kind: str, error: BaseException) -> str:
    """Return one line about why a user's function could not be loaded, and what to do.

    Args:
        path: the function's path, `package.module:function`.
        kind: the function's purpose, such as `reward function`.
        error: the error of `load`.

    """
    reason = " ".join(str(error).split())
    if isinstance(error, ForbiddenFunction):
        return f"{path} is not allowed: {reason}"
    if isinstance(error, InvalidUserFunction):
        return f"{path} is not {'an' if kind[0] in 'aeiou' else 'a'} {kind}: {reason}"
    module = path.partition(":")[0]
    place = place_of(error)
    problem = f"{path} cannot be imported: {type(error).__name__}: {reason}" + (f" ({place})" if place else "")
    if not isinstance(error, ModuleNotFoundError):
        return f"{problem}; fix {module}"
    if not f"{module}.".startswith(f"{error.name}."):
        return f"{problem}; install it, or fix {module}"
    return (
        f"{problem}, searched from {Path.cwd()}; name it from there, as jobs.{module} in a subfolder jobs, start the "
        f"trainer in a folder from which 'import {module}' works, or add that folder to PYTHONPATH"
    )


def detect_style(function: Callable[..., Any], arguments: Mapping[str, Any], style: str = "auto") -> str:
    """Return the calling convention of a function, `trl` or `verl`.

    Args:
        function: any callable.
        arguments: the keyword arguments in the job file.
        style: `auto`, or the required convention.

    Raises:
        InvalidUserFunction: the signature does not match; the text shows it and says what to do.

    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return "trl" if style == "auto" else style
    takes = {name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if style == "auto":
        style = "verl" if "solution_str" in takes and "completions" not in takes else "trl"
    parameters = VERL_ARGUMENTS if style == "verl" else TRL_ARGUMENTS
    try:
        # The data may have further columns that the function requires, so only surplus arguments are an error.
        signature.bind_partial(**dict.fromkeys((*parameters, *arguments)))
    except TypeError as error:
        raise InvalidUserFunction(
            f"it takes {signature}, which fits neither TRL's (prompts, completions, completion_ids, **columns) nor "
            f"verl's (data_source, solution_str, ground_truth, extra_info): {error}"
            if style == "trl" and takes.isdisjoint(TRL_ARGUMENTS)
            else f"it takes {signature}, but is called with {', '.join((*parameters, *arguments))}: {error}"
        ) from error
    return style


def missing_columns(
    function: Callable[..., Any], arguments: Mapping[str, Any], style: str, columns: Collection[str]
) -> str:
    """Return what a function needs and the data do not have, an empty text if nothing is missing.

    Args:
        function: the user's function, with the signature `style`.
        arguments: the keyword arguments in the job file.
        style: `trl` or `verl`, as `detect_style` returns it.
        columns: those of a data row, without the prompt.

    """
    if style == "verl":
        known = ("reward_model", *TRUTH_COLUMNS)
        return "" if any(name in columns for name in known) else f"one of the columns {', '.join(known)}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some C functions have none
        return ""
    given = {*TRL_ARGUMENTS, *RAW_ARGUMENTS, *arguments, *columns}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [p.name for p in parameters if p.kind in named and p.default is p.empty and p.name not in given]
    return f"the column {', '.join(map(repr, missing))}" if missing else ""


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of this name that can be passed by name."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # some C functions have none
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def ground_truth(row: Mapping[str, Any]) -> Any:
    """Return a row's ground truth: verl's `reward_model.ground_truth`, or one of `TRUTH_COLUMNS`.

    Raises:
        KeyError: the row has none of these columns.

    """
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    for name in TRUTH_COLUMNS:
        if name in row:
            return row[name]
    raise KeyError(f"the data has no column reward_model.ground_truth, {', '.join(TRUTH_COLUMNS)}")
