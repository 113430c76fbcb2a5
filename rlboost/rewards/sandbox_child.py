"""Runs a program, or tests of one, in its own process: a script of `rlboost.rewards.sandbox`, standard library only.

Its arguments are the descriptor of a socket, the id of the process with which it ends, or 0, and the descriptor of the
connection between a program and its tests, or 0. The socket transports lines of JSON: first a request, `{"limits",
"confine", "calls"}` with `program` or `tests`; `calls` is the text of `remote_calls`. After the program's last
statement the script sends an empty line, and answers the tests. After the last test it sends one line: why the tests
cannot be run so, as JSON, an empty text if they passed.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

_UNAVAILABLE = 125
"""Exit code if the process cannot be confined; the reason is on standard error."""
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_VERSION = 1
"""Flag: return Landlock's version instead of a rule set."""
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Landlock's version -> number of kinds of file access that it knows."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confine this process as the request asks, then run the program in it."""
    descriptor, parent, link = map(int, sys.argv[1:])
    if parent:
        _call("prctl", libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
        _call("prctl", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if os.getppid() != parent:
            sys.exit("the parent has ended")
    os.set_inheritable(descriptor, False)
    if link:
        os.set_inheritable(link, False)
    lines = open(descriptor, encoding="utf-8")  # noqa: PTH123, SIM115 - a descriptor; it is open until the end
    request = json.loads(lines.readline())
    try:
        if (confine := request["confine"]) is not None:
            _confine(confine["readable"], confine["devices"])
        for name, limit in request["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        if confine is not None:
            _filter_system_calls(bytes.fromhex(confine["filter"]))
    except OSError as error:
        sys.stderr.write(f"{error.strerror}: {error.filename}")
        sys.exit(_UNAVAILABLE)
    sys.argv = ["program.py"]
    if "tests" in request:
        why = _calls(request).judge(_connection(link), request["tests"])
        os.write(descriptor, json.dumps(why).encode() + b"\n")
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["program"], "program.py", "exec"), module.__dict__)  # noqa: S102 - this is what it is for
    os.write(descriptor, b"\n")
    if link:
        _calls(request).Peer(_connection(link), module.__dict__, is_judge=False).serve()


def _calls(request: dict[str, Any]) -> Any:
    module = types.ModuleType("remote_calls")
    exec(compile(request["calls"], "remote_calls", "exec"), module.__dict__)  # noqa: S102 - our own module
    return module


def _connection(descriptor: int) -> io.BufferedRWPair:
    return io.BufferedRWPair(io.FileIO(descriptor, "rb"), io.FileIO(os.dup(descriptor), "wb"))


def _confine(readable: list[str], devices: list[str]) -> None:
    """Drop all capabilities, and with Landlock all access to files except reading below some paths."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call("capset", libc.capset(header, none))
    version = _call("landlock", libc.syscall(_CREATE_RULESET, None, 0, _ABI_VERSION))
    handled = (1 << _ACCESS_BITS.get(version, max(_ACCESS_BITS.values()))) - 1
    rules = _call("landlock", libc.syscall(_CREATE_RULESET, struct.pack("=Q", handled), 8, 0))
    for paths, access in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (devices, _READ_FILE | _WRITE_FILE)):
        for path in paths:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access if os.path.isdir(path) else access & ~_READ_DIR  # noqa: PTH112 - starts with each program
            rule = struct.pack("=Qi", allowed, file)
            _call(path, libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
            os.close(file)
    _call("landlock", libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _filter_system_calls(program: bytes) -> None:
    """Allow only the system calls that a BPF program allows."""
    instructions = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _call("seccomp", libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0))


def _call(what: str, result: Any) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return int(result)


if __name__ == "__main__":
    main()
