"""The ways to isolate a program: bubblewrap, Landlock, none.

Each lets the program see Python and its libraries, and nothing else of the machine's files.
"""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlboost.rewards.syscalls import program_filter

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_NOBODY = "65534"


class Isolation(enum.StrEnum):
    """How a program is kept from the rest of the machine, in order of preference."""

    BUBBLEWRAP = enum.auto()
    """Namespaces: it has no network, processes or files of the machine."""
    LANDLOCK = enum.auto()
    """Landlock: it cannot open other files. Works where namespaces are forbidden, as in most containers."""
    NONE = enum.auto()
    """It may do what its user may do."""


def bubblewrap_command(work: str, file_bytes: int, filter_descriptor: int) -> list[str]:
    """Return the command that runs what follows it in a new root; only `work`, a tmpfs, is writable.

    Raises:
        FileNotFoundError: bubblewrap is not installed.

    """
    if (program := shutil.which("bwrap")) is None:
        raise FileNotFoundError("it is not installed")
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--uid", _NOBODY, "--gid", _NOBODY, "--seccomp", str(filter_descriptor)]
    for path in readable_paths():
        options += ["--ro-bind", path, path]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    return [program, *options, "--size", str(file_bytes), "--tmpfs", work, "--remount-ro", "/", "--chdir", work, "--"]


def landlock_request(work: str) -> dict[str, Any]:
    """Return what `sandbox_child` needs to confine itself; `work` is readable only, since nothing limits its size."""
    return {
        "readable": [*readable_paths(), work],
        "devices": DEVICES,
        "filter": program_filter(in_namespaces=False).hex(),
    }


@lru_cache(maxsize=1)
def readable_paths() -> list[str]:
    """Return the paths of Python and of its libraries, parents first, none below another."""
    prefixes = {Path(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)}
    prefixes |= {prefix.resolve() for prefix in prefixes} | {Path(sys.executable).resolve().parents[1]}
    return [str(path) for path in _outermost(prefixes | {Path(path) for path in _SYSTEM_PATHS}) if path.exists()]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in sorted(paths):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found
