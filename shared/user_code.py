"""A user's functions: which a job file may name, how they are imported, how rewards of TRL and verl are called.

An error of user code is described for its author: where it was raised, and with which data row.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import reprlib
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from rlboost.shared.errors import ConfigError

MAX_CHARS = 4_000
"""Descriptions are cut to this length."""
_MESSAGE_CHARS = 500
_ROW_CHARS = 600
_MAX_FRAMES = 12
_LINE_CHARS = 300
_HOSTS = ("rlboost.services.", "rlboost.shared.")
"""Packages whose functions call user code."""
_STDLIB = sysconfig.get_path("stdlib")
_SITE = "site-packages"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = 3


def describe_error(error: BaseException, row: Mapping[str, Any] | None = None) -> str:
    r"""Return the error and its place in the first line, then the data row, then the traceback of user code.

    Such as `ValueError: boom (sums/reward.py:7)\nrow: prompt='2+2='\nTraceback ...`. The frames that called the user
    code are left out.

    Args:
        error: raised by user code.
        row: the data that it was called with; long values are shortened.

    """
    called = _user_part(error.__traceback__)
    lines = [_headline(error, called)]
    if row:
        lines.append(describe_row(row))
    if called is not None:
        shown = traceback.TracebackException(type(error), error, called, limit=-_MAX_FRAMES)
        lines += [line[:_LINE_CHARS] for line in "".join(shown.format()).rstrip().splitlines()]
    return "\n".join(lines)[:MAX_CHARS].encode(errors="backslashreplace").decode()


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a data row as one line; long values are shortened."""
    return "row: " + ", ".join(f"{name}={describe_value(value)}" for name, value in row.items())[:_ROW_CHARS]


def describe_value(value: object) -> str:
    """Return a value for its author, shortened; also if it cannot be formatted."""
    try:
        return _short.repr(value).encode(errors="backslashreplace").decode()
    except Exception as broken:  # noqa: BLE001 - the user's class may raise anything
        return f"a {type(value).__name__} (it cannot be formatted: {type(broken).__name__})"


def place_of(error: BaseException) -> str:
    """Return `file:line` where user code raised the error, an empty text if it did not."""
    return _place(_user_part(error.__traceback__))


def _headline(error: BaseException, called: TracebackType | None) -> str:
    try:
        message = " ".join(str(error).split())[:_MESSAGE_CHARS]
    except Exception as broken:  # noqa: BLE001 - the user's class may raise anything
        message = f"(its message cannot be formatted: {type(broken).__name__})"
    place = _place(called)
    return f"{type(error).__name__}: {message}" + (f" ({place})" if place else "")


def _user_part(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of user code on, None if there is none."""
    while tb is not None and (_is_host(tb.tb_frame) or _is_stdlib(tb.tb_frame)):
        tb = tb.tb_next
    return tb


def _place(tb: TracebackType | None) -> str:
    """Return the file and line of the innermost frame that is no library's."""
    frames = list(traceback.walk_tb(tb))
    places = [
        (frame, line)
        for frame, line in frames
        if not (_is_host(frame) or _is_stdlib(frame) or _SITE in frame.f_code.co_filename)
    ] or frames
    if not places:
        return ""
    frame, line = places[-1]
    file = Path(frame.f_code.co_filename)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


def _is_host(frame: FrameType) -> bool:
    if frame.f_code.co_filename == "<string>":  # a program given to `python -c`
        return True
    spec = frame.f_globals.get("__spec__")  # a process's main module has no other name
    return str(spec.name if spec is not None else frame.f_globals.get("__name__")).startswith(_HOSTS)


def _is_stdlib(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_STDLIB, "<frozen ")) and _SITE not in file


# --- Which functions a job file may name ------------------------------------------------------------------------------
# A client that can create jobs chooses the functions that the trainer calls, and their arguments. It may name the
# functions of `OUR_FUNCTIONS`, and those that the trainer's operator provides: of the folder in which the trainer was
# started, and of `PYTHONPATH`. The standard library, the rest of rlboost and installed packages contain functions that
# run programs and write files. Operators allow an installed package in the setting `RLBOOST_TRAINER_USER_MODULES`.

Kind = Literal["reward function", "environment", "agent", "loss function", "curriculum function"]
"""What a job file names a function for."""

USER_MODULES_SETTING = "RLBOOST_TRAINER_USER_MODULES"
"""Installed packages that job files may name, separated by commas."""
UNISOLATED_SETTING = "RLBOOST_TRAINER_UNISOLATED_PROGRAMS"
"""True allows `isolated: false` of the reward for programs."""
CODE_REWARD = "rlboost.rewards.code:score"
PROGRAM_AGENT = "rlboost.agents.program:run"
VERIFIERS_AGENT = "rlboost.agents.verifiers:Environment"
HARBOR_AGENT = "rlboost.agents.harbor:Tasks"
OUR_FUNCTIONS: Mapping[str, Kind] = {
    CODE_REWARD: "reward function",
    PROGRAM_AGENT: "agent",
    VERIFIERS_AGENT: "agent",
    HARBOR_AGENT: "agent",
    "rlboost.rewards.math:score": "reward function",
    "rlboost.examples.countdown.reward:score": "reward function",
    "rlboost.examples.sums.reward:score": "reward function",
    "rlboost.examples.router.environment:Router": "environment",
    "rlboost.examples.second_try.agent:run": "agent",
    "rlboost.examples.second_try.environment:SecondTry": "environment",
    "rlboost.examples.team.agent:run": "agent",
    "rlboost.examples.team.agent:self_play": "agent",
}
"""All of rlboost that a job file may name. `tests/unit/shared/test_user_code_allowed.py` walks all that it may not."""
_WHERE = (
    "a job file may name functions of the folder in which the trainer was started, of PYTHONPATH, and "
    + ", ".join(OUR_FUNCTIONS)
)
_SIMILAR = 0.9
_CHECKOUT = ("rlboost", "services", "shared", "benchmarks", "examples", "recipes", "docs")


class ForbiddenFunction(TypeError):
    """A job file names a function that it may not name; the text says which it may."""


def check_name(path: str, kind: Kind) -> None:
    """Check what can be said about `package.module:function` on any machine.

    Raises:
        ForbiddenFunction: it is of rlboost, and not in `OUR_FUNCTIONS` for this kind; or of the standard library.

    """
    top = path.partition(":")[0].partition(".")[0]
    if top == "rlboost":
        if path not in OUR_FUNCTIONS:
            similar = difflib.get_close_matches(path, OUR_FUNCTIONS, 1, _SIMILAR)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise ForbiddenFunction(f"it is internal to rlboost{hint}: {_WHERE}")
        if OUR_FUNCTIONS[path] != kind:
            raise ForbiddenFunction(f"it is of the kind {OUR_FUNCTIONS[path]}, and is named as {kind}")
    _check_not_standard(top)


def check_arguments(path: str, arguments: Mapping[str, Any]) -> None:
    """Check that a function of ours has no arguments that only the operator may allow.

    Raises:
        ForbiddenFunction: it has; the text says what is allowed.

    """
    if path == PROGRAM_AGENT and "command" in arguments:
        _check_program(arguments["command"])
    if path == VERIFIERS_AGENT and "env_id" in arguments:
        check_module(verifiers_module(str(arguments["env_id"])))
    if path == HARBOR_AGENT:
        _check_tasks(arguments.get(name) for name in ("folder", "eval_folder"))
    if path == CODE_REWARD and arguments.get("isolated", True) is not True and not unisolated_is_allowed():
        raise ForbiddenFunction(
            f"isolated: {arguments['isolated']} lets generated programs do what the trainer's user may do: remove it, "
            f"or, on a machine that has nothing to protect, start the trainer with {UNISOLATED_SETTING}=true"
        )


def verifiers_module(env_id: str) -> str:
    """Return the module that an id of verifiers' environments names, as `verifiers.load_environment` does."""
    return env_id.replace("-", "_").rpartition("/")[2]


def _check_program(command: Any) -> None:
    """Check that a command begins with a program of the operator's, as functions are."""
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise ForbiddenFunction(f"command: {command!r} should be a list of texts: a file, then its arguments")
    if "/" not in command[0]:
        raise ForbiddenFunction(f"command: {command[0]} would be searched in PATH: write ./{command[0]}")
    program = Path(command[0]).absolute()
    if not _is_of_operators(program.resolve()) or not program.is_file():
        raise ForbiddenFunction(
            f"command: {command[0]} is no file in the folder in which the trainer was started, or in a folder of "
            "PYTHONPATH, or is hidden or of an installed package: name a script, as ./agent.sh, which may start others"
        )
    if not os.access(program, os.X_OK):
        raise ForbiddenFunction(f"command: {command[0]} cannot be executed: run chmod +x on it")


def _check_tasks(folders: Iterable[Any]) -> None:
    """Check that folders of tasks, which are code, are the operator's, or links in a folder of the operator's."""
    for place in (Path(str(folder)).absolute() for folder in folders if folder is not None):
        if not _is_of_operators(place.resolve()) and (".." in place.parts or not _is_of_operators(place)):
            where = "the folder in which the agents were started, or a folder of PYTHONPATH"
            raise ForbiddenFunction(f"{place} is not in {where}, or is hidden or of a package: link to the tasks there")


def _is_of_operators(place: Path) -> bool:
    """Return True if a file or folder is in one of the operator's, and not hidden or of a venv (`torchrun`) there."""
    for folder in {one.resolve() for one in _operators()}:
        if place.is_relative_to(folder):
            inner = place.relative_to(folder)
            environments = [folder / parent / mark for parent in inner.parents for mark in ("pyvenv.cfg", "conda-meta")]
            if not any(part.startswith(".") for part in inner.parts) and not any(map(Path.exists, environments)):
                return not _is_below(place, _installed() | _ours())
    return False


def unisolated_is_allowed() -> bool:
    """Return True if the operator allows programs without isolation, by the environment of this process."""
    return os.environ.get(UNISOLATED_SETTING, "").strip().lower() in ("1", "true", "yes", "on", "t", "y")


def check_module(name: str) -> None:
    """Check that a job file may name functions of this module, without importing it.

    Raises:
        ForbiddenFunction: it is of the standard library or of rlboost, or not in a folder of the operator's, such as
            an installed package.

    """
    top = name.partition(".")[0]
    if top == "rlboost":
        raise ForbiddenFunction(f"{name} is internal to rlboost: {_WHERE}")
    _check_not_standard(top)
    if top in os.environ.get(USER_MODULES_SETTING, "").replace(" ", "").split(","):
        return
    for origin in _origins(top):
        if _is_below(origin, _installed()) or not _is_below(origin, _operators()):
            raise ForbiddenFunction(
                f"{top} is an installed package: {_WHERE}; to allow it, set {USER_MODULES_SETTING}={top} there, or "
                "write a function that calls it"
            )
        if _is_below(origin, _ours()):
            raise ForbiddenFunction(f"{top} is internal to rlboost: {_WHERE}")


def _check_not_standard(top: str) -> None:
    if top in sys.stdlib_module_names or top == "__main__":
        raise ForbiddenFunction(f"{top} is in the standard library: {_WHERE}; write a function that calls it")


def check_path(path: str, kind: Kind) -> None:
    """Check that a job file may name `package.module:function`, without importing it.

    Raises:
        ForbiddenFunction: it may not.

    """
    check_name(path, kind)
    if path not in OUR_FUNCTIONS:
        check_module(path.partition(":")[0])


def check_function(path: str, found: Any, kind: Kind) -> None:
    """Check that a path leads to a function that a job file may name, not to one that its module only imports.

    A user's module may import a function of any other module of theirs.

    Raises:
        ForbiddenFunction: it belongs to the standard library, to rlboost or to an installed package; or it is a class
            where a function is called.

    """
    while isinstance(found, functools.partial):
        found = found.func
    if path not in OUR_FUNCTIONS:
        check_module(getattr(found, "__module__", None) or type(found).__module__)
    if isinstance(found, type) and kind not in ("environment", "agent"):
        raise ForbiddenFunction(f"it is a class: name a {kind}, or write one that calls the class")


def _origins(top: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # the import says why
    if spec is not None:
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        yield from (Path(place).absolute() for place in places if place)


def _is_below(origin: Path, folders: Iterable[Path]) -> bool:
    """Return True if a file is in one of the folders, by its name or after following links."""
    forms = {origin, origin.resolve()}
    return any(form.is_relative_to(f) for folder in folders for f in {folder, folder.resolve()} for form in forms)


def _installed() -> set[Path]:
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    return {Path(folder).absolute() for folder in (*folders, *site.getsitepackages(), site.getusersitepackages())}


def _operators() -> list[Path]:
    """Return the folders that Python searches before its own and packages: the current one, those of `PYTHONPATH`."""
    own = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = [Path(entry).absolute() for entry in sys.path]
    return list(itertools.takewhile(lambda folder: folder.resolve() not in own, found))


def _ours() -> set[Path]:
    # In a checkout these are folders of its root, which may be on the path.
    root = Path(__file__).resolve().parents[1]
    return {root / part for part in _CHECKOUT}


# --- Reward functions of users: importing them, and the calling conventions of TRL and verl ---------------------------
# TRL calls a function with a whole group, verl with one completion.


TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
_TRL_ONLY = ("log_extra", "log_metric", "trainer_state")
"""Arguments of TRL's trainer that are not passed here."""
RAW_ARGUMENTS = ("completions_raw",)
"""Ours, for functions of TRL's signature that have such a parameter: the completions with special tokens."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRUTH_COLUMNS = ("ground_truth", "answer", "final_answer", "expected_answer", "solution", "label")
"""Columns that may hold the ground truth, besides verl's `reward_model.ground_truth`."""
MAX_REWARD = 1e15
"""Largest absolute reward. Beyond about 9e15 a float no longer tells neighboring integers apart; and the square of a
larger gradient is infinite in float32."""


def checked_cost(cost: Any) -> float:
    """Return a cost as a float, 0 for None.

    Raises:
        ValueError: it is not a finite number from 0 to `MAX_REWARD`.

    """
    try:
        number = 0.0 if cost is None else math.nan if isinstance(cost, str | bytes) else float(cost)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= MAX_REWARD:
        raise ValueError(f"the cost is {describe_value(cost)}: give a finite number from 0 to {MAX_REWARD:g}")
    return number


class InvalidUserFunction(TypeError):
    """A module has no such function, or the function has the wrong signature."""


def load(path: str, kind: Kind) -> Callable[..., Any]:
    """Import and return `package.module:function`; this runs the user's code.

    Raises:
        ForbiddenFunction: a job file may not name it; nothing was imported.
        InvalidUserFunction: it does not exist, or is not callable.
        Exception: whatever the user's code raises.

    """
    place, _, names = path.partition(":")
    check_path(path, kind)
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
    check_function(path, found, kind)
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
    if path in OUR_FUNCTIONS:
        return problem
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
        InvalidUserFunction: the signature does not match, or the job file gives an argument that RLBoost passes; the
            text says what to do.

    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return "trl" if style == "auto" else style
    takes = {name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if style == "auto":
        style = "verl" if "solution_str" in takes and "completions" not in takes else "trl"
    parameters = VERL_ARGUMENTS if style == "verl" else TRL_ARGUMENTS
    required = {name for name, p in signature.parameters.items() if name in takes and p.default is p.empty}
    if unpassed := [name for name in _TRL_ONLY if name in required and name not in arguments]:
        raise InvalidUserFunction(
            f"RLBoost does not pass {', '.join(unpassed)}, as TRL's trainer does: give such parameters a default, and "
            "measure with further reward functions of weight 0"
        )
    passed = [name for name in (*parameters, *(RAW_ARGUMENTS if style == "trl" else ())) if name in arguments]
    if passed:
        raise InvalidUserFunction(f"RLBoost itself passes {passed[0]!r}: remove it from reward.arguments")
    try:
        # The data may have further columns that the function requires, so only surplus arguments are an error.
        signature.bind_partial(**dict.fromkeys((*parameters, *arguments)))
    except TypeError as error:
        hint = "; add **columns, which takes what it does not use" if arguments.keys() <= takes else ""
        raise InvalidUserFunction(
            f"it takes {signature}, which fits neither TRL's (prompts, completions, completion_ids, **columns) nor "
            f"verl's (data_source, solution_str, ground_truth, extra_info): {error}"
            if style == "trl" and takes.isdisjoint(TRL_ARGUMENTS)
            else f"it takes {signature}, but is called with {', '.join((*parameters, *arguments))}: {error}{hint}"
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


def hidden_argument(arguments: Mapping[str, Any], style: str, columns: Collection[str], place: str) -> str:
    """Return the problem of an argument in the job file that a column of the data would replace, empty if none does.

    Args:
        arguments: the keyword arguments in the job file.
        style: `trl` or `verl`, as `detect_style` returns it; verl's functions get no columns by name.
        columns: those of data rows, without the prompt.
        place: where the columns are, for display.

    """
    both = [name for name in arguments if name in columns and style == "trl"]
    if not both:
        return ""
    return (
        f"reward.arguments: {both[0]!r} is also a column of {place}, and the function gets one of them: rename the "
        "argument or the column"
    )


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
    if found := [row[name] for name in TRUTH_COLUMNS if name in row]:
        return next((value for value in found if value is not None), None)
    raise KeyError(f"the data has no column reward_model.ground_truth, {', '.join(TRUTH_COLUMNS)}")


# --- User functions named in a job file that run in the trainer's process ---------------------------------------------


_mtimes: dict[str, int] = {}
"""Module -> modification time of its file when it was last imported, in nanoseconds."""


def load_user_function(field: str, path: str, arguments: Sequence[str], kind: Kind) -> Callable[..., Any]:
    """Import and return the function `package.module:function`; this runs the user's code.

    A module whose file has changed since is reloaded; the modules that it imports are not.

    Args:
        field: the field of the job file, for errors.
        path: the function's path.
        arguments: names of the function's positional arguments, for errors.
        kind: what it is for.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take these arguments.

    """
    try:
        check_path(path, kind)
        _reload_if_changed(path.partition(":")[0])
        function = load(path, kind)
    except Exception as error:
        raise ConfigError(f"{field}: {describe_import_error(path, 'function', error)}") from error
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{field}: {path} takes {signature}, but is called with ({', '.join(arguments)}): {error}"
        ) from error
    return function


def _reload_if_changed(name: str) -> None:
    module = sys.modules.get(name) or importlib.import_module(name)
    if (file := getattr(module, "__file__", None)) is None:
        return
    mtime = Path(file).stat().st_mtime_ns
    if _mtimes.setdefault(name, mtime) != mtime:
        _mtimes[name] = mtime
        importlib.reload(module)
