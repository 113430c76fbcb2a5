"""What a process sets for itself: its CPUs, threads, open files, garbage collection and memory dumps."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from rlboost.shared.errors import ConfigError

# --- Bind a process to CPUs, for example to those next to its GPUs ----------------------------------------------------


_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> set[int]:
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


def bind_to_cpus(cpus: str) -> None:
    """Let this thread, and the threads and processes that it starts, run on these CPUs only; empty changes nothing.

    CPUs that the process may not use anyway are ignored, for example those outside its container.

    Raises:
        ConfigError: it is not a list of CPUs, or the process may use none of them.

    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    allowed = parse_cpus(cpus) & os.sched_getaffinity(0)
    if not allowed:
        raise ConfigError(f"CPUs {cpus}: this process may use none of them; correct the setting CPUS, or remove it")
    os.sched_setaffinity(0, allowed)


# --- Hides the secrets of this process from other processes of its user -----------------------------------------------


_PR_SET_DUMPABLE = 4


def protect_process_memory() -> None:
    """Make this process's environment and memory readable by root only, and dump no core; Linux only.

    Programs that it executes are readable again.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- Runs the garbage collector less often: during large imports, and in processes with many long-lived objects -------


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector, which makes importing libraries such as torch a sixth faster.

    Such an import creates a million objects that all stay alive, and the collector would scan them repeatedly.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage_rarely() -> None:
    """Let the garbage collector scan all objects only every ten million new ones, and never those of today.

    For a process with many long-lived objects and hardly any reference cycles, once it has imported its modules, whose
    scan takes 60 ms: with 100,000 samples in flight a full scan stops the manager for 100 ms. Other scans see at most
    7,500 objects, the new ones: with four times as many they took as long together, and one of them up to 15 ms.
    """
    gc.set_threshold(2_500, 1, 1333)
    gc.collect()
    gc.freeze()


# --- The limit of open files: each connection, stream and process needs one -------------------------------------------


ENOUGH_OPEN_FILES = 1 << 20
"""More than a service opens; some systems refuse to set a soft limit of "unlimited"."""


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit, up to `ENOUGH_OPEN_FILES`; return the soft limit.

    Children inherit it. Many systems start programs with a soft limit of 1,024 or 256, which a few hundred clients or
    workers reach.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = ENOUGH_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH_OPEN_FILES
    if soft < highest:
        # macOS refuses more than its own limit for a process, which it reports nowhere.
        for limit in (highest, 10_240):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return soft


# --- Runs blocking work in a thread that neither a cancelled task nor the end of the process waits for ----------------


T = TypeVar("T")


def run_in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in its own daemon thread and return its outcome.

    Unlike `asyncio.to_thread`, no pool is joined when the process ends, so `work` may block forever. Cancelling the
    returned future does not stop `work`; its outcome is then dropped.

    Args:
        name: the thread's name, as stack dumps show it.
        work: called once; whatever it raises is raised where the future is awaited.

    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            outcome.set_exception(error)

    # With the context, so that log lines have its fields, such as `job`.
    threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)
