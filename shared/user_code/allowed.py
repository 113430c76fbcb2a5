"""Which functions a job file may name.

A client that can create jobs chooses the functions that the trainer calls, and their arguments. Only functions that the
trainer's operator provides may be named: those of the folder in which the trainer was started, of `PYTHONPATH`, and of
rlboost's packages for users. The standard library, rlboost's own code and installed packages contain functions that run
programs and write files. Operators allow an installed package in the setting `RLBOOST_TRAINER_USER_MODULES`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

USER_MODULES_SETTING = "RLBOOST_TRAINER_USER_MODULES"
"""Installed packages that job files may name, separated by commas."""
OUR_PACKAGES = ("rlboost.rewards", "rlboost.environments", "rlboost.examples")
_WHERE = (
    "a job file may name functions of the folder in which the trainer was started, of PYTHONPATH, and of "
    + ", ".join(OUR_PACKAGES)
)


class ForbiddenFunction(TypeError):
    """A job file names a function that it may not name; the text says which it may."""


def check_module(name: str) -> None:
    """Check that a job file may name functions of this module, without importing it.

    Raises:
        ForbiddenFunction: it may not.

    """
    top = name.partition(".")[0]
    if top == "rlboost":
        if not f"{name}.".startswith(tuple(f"{package}." for package in OUR_PACKAGES)):
            raise ForbiddenFunction(f"{name} is internal to rlboost: {_WHERE}")
        return
    if top in sys.stdlib_module_names:
        raise ForbiddenFunction(f"{top} is in the standard library: {_WHERE}; write a function that calls it")
    if top in os.environ.get(USER_MODULES_SETTING, "").replace(" ", "").split(","):
        return
    for origin in _origins(top):
        if any(origin.is_relative_to(folder) for folder in _installed()):
            raise ForbiddenFunction(
                f"{top} is an installed package: {_WHERE}; to allow it, set {USER_MODULES_SETTING}={top} there"
            )
        if any(origin.is_relative_to(folder) for folder in _ours()):
            raise ForbiddenFunction(f"{top} is internal to rlboost: {_WHERE}")


def check_function(path: str, found: Any) -> None:
    """Check that a path leads to a function that a job file may name, not to one that its module only imports.

    A user's module may import a function of any other module of theirs; it may not lead to an attribute of one.

    Raises:
        ForbiddenFunction: it belongs to the standard library, or is reached through an attribute of a package.

    """
    while isinstance(found, functools.partial):
        found = found.func
    module = getattr(found, "__module__", None) or type(found).__module__
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ForbiddenFunction(f"{path} is {module}'s, of the standard library: {_WHERE}")
    place, _, names = path.partition(":")
    if "." in names or place.partition(".")[0] == "rlboost":
        check_module(module)


def _origins(top: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # the import says why
    if spec is not None:
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        yield from (Path(place).resolve() for place in places if place)


def _installed() -> set[Path]:
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return {Path(folder).resolve() for folder in (*folders, *site.getsitepackages(), site.getusersitepackages())}


def _ours() -> set[Path]:
    # In a checkout these are folders of its root, which may be on the path.
    root = Path(__file__).parents[2]
    return {(root / part).resolve() for part in ("services", "shared")}
