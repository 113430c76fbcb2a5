"""Bind a process to CPUs, for example to those next to its GPUs."""

from __future__ import annotations

import os
import re

from rlboost.shared.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse(text: str) -> set[int]:
    """Return the CPUs of a list such as `0-15,32-47`.

    Raises:
        ConfigError: it is not such a list.

    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a list of CPUs: use the form 0-15,32-47")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def bind(cpus: str) -> None:
    """Let this thread, and the threads and processes that it starts, run on these CPUs only; empty changes nothing.

    CPUs that the process may not use anyway are ignored, for example those outside its container.

    Raises:
        ConfigError: it is not a list of CPUs, or the process may use none of them.

    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    allowed = parse(cpus) & os.sched_getaffinity(0)
    if not allowed:
        raise ConfigError(f"CPUs {cpus}: this process may use none of them; correct the setting CPUS, or remove it")
    os.sched_setaffinity(0, allowed)
