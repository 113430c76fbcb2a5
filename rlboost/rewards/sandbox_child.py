"""Isolate this process, then run a program: a script of `rlboost.rewards.sandbox`, standard library only.

Standard input has JSON: `{"program", "epilogue", "input", "work", "isolated", "cpu_s", "memory_bytes", "file_bytes"}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

UNAVAILABLE = 125
"""Exit code if the kernel refuses isolation; the reason is on standard error."""
_NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000
"""Users, network, processes, mounts, System V objects."""
_MS_REC_PRIVATE = 0x4000 | 1 << 18
_MS_NOSUID_NODEV = 2 | 4
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534
_MOST_PROCESSES = 64
_MOST_FILES = 256

_MAIN = """
import os, sys, types
descriptor = int(sys.argv.pop())
sys.argv = ["program.py"]
module = sys.modules["__main__"] = types.ModuleType("__main__")
with open("program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"), module.__dict__)
with open(descriptor, encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "epilogue", "exec"), module.__dict__)
"""
"""Runs the program and then its epilogue, which has what the program must not know: what is expected of it."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program; return its exit code, or 128 plus the signal that ended it."""
    _call(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")  # our limits are enforced by the parent
    asked = json.load(sys.stdin.buffer)
    if asked["isolated"]:
        try:
            _shut_in(asked["work"], asked["file_bytes"])
        except OSError as error:
            sys.stderr.write(f"{error.strerror}: {error.filename or 'unshare'}")
            return UNAVAILABLE
    os.chdir(asked["work"])
    Path("program.py").write_text(asked["program"], encoding="utf-8")
    Path("input").write_text(asked["input"], encoding="utf-8")
    if not asked["isolated"]:
        _run(asked)
    # The first process of the new PID namespace: when it exits, the kernel kills the others.
    if (first := os.fork()) == 0:
        _call(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
        if (program := os.fork()) == 0:
            _run(asked)
        os._exit(_code(program))
    return _code(first)


def _shut_in(work: str, file_bytes: int) -> None:
    """Detach from the network, other processes, and everything writable outside `work`."""
    uid, gid = os.getuid(), os.getgid()
    _call(libc.unshare(_NEW_NAMESPACES), "unshare")
    # Unmapped user: executed programs have no privileges, not even over these mounts.
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{_NOBODY} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{_NOBODY} {gid} 1", encoding="ascii")
    _call(libc.mount(None, b"/", None, _MS_REC_PRIVATE, None), "mount /")
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    code = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _call(code, "mount_setattr / read-only")
    size = f"size={file_bytes},mode=700".encode()
    _call(libc.mount(b"tmpfs", work.encode(), b"tmpfs", _MS_NOSUID_NODEV, size), f"mount {work}")
    # /proc exposes the environment of this user's other processes.
    _call(libc.mount(b"tmpfs", b"/proc", b"tmpfs", _MS_NOSUID_NODEV, b"size=4096,mode=555"), "mount /proc")


def _run(asked: dict[str, Any]) -> None:
    """Replace this process with the program."""
    cpu_s = asked["cpu_s"]
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: asked["memory_bytes"],
        resource.RLIMIT_FSIZE: asked["file_bytes"],
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if asked["isolated"]:  # outside a namespace the limit counts all processes of the user
        limits[resource.RLIMIT_NPROC] = _MOST_PROCESSES
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))
    _call(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.dup2(os.open("input", os.O_RDONLY), 0)
    epilogue = os.memfd_create("epilogue", 0)
    with open(epilogue, "w", encoding="utf-8", closefd=False) as file:
        file.write(asked["epilogue"])
    os.lseek(epilogue, 0, os.SEEK_SET)
    arguments = [sys.executable, "-I", "-B", "-c", _MAIN, str(epilogue)]
    os.execv(sys.executable, arguments)  # noqa: S606 - this is what it is for


def _code(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 128 - code if code < 0 else code


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    sys.exit(main())
