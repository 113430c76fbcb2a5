"""Run a command that dies with the process that started it: `die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]`.

A script and not a `preexec_fn`, because Python code between fork and exec is unsafe once the parent has threads.
On systems other than Linux the command runs unbound.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_CONFIG = 2
"""The value of `shared.process.lifecycle`, which is not importable here: this script runs without site-packages."""


def prctl(option: int, value: int) -> None:
    """Set an option of this process.

    Raises:
        OSError: the kernel refuses it.

    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def guarded(*command: str) -> tuple[str, ...]:
    """Return the command that runs `command` and dies with the calling process."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def main() -> int:
    """Replace this process with the command; return an exit code only on failure."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died first
            return 1
    try:
        os.execvp(command[0], command)  # noqa: S606 - running the given command is this script's purpose
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
