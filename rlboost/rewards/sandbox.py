"""Run untrusted Python in isolation, with resource limits and a hard kill.

An isolated program is one process without a network. It can read Python and its libraries, and no other file of the
machine.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from rlboost.rewards import remote_calls, sandbox_child

# --- The system calls that a program in the sandbox may use: an allow-list, as a seccomp filter -----------------------
# Anything else fails with ENOSYS, as on a kernel that does not have it. Missing are, on purpose: sockets (except
# pairs), new processes, other processes' memory and limits, namespaces, mounts, keys, io_uring, and shared memory,
# which no limit covers.


_ALLOWED = """
access alarm arch_prctl brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range
creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve
exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fdatasync flock fstat fstatfs fsync ftruncate futex
futex_waitv get_robust_list getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpgid
getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
gettid gettimeofday getuid link linkat lseek lstat madvise membarrier mincore mkdir mkdirat mlock mlock2 mmap mprotect
mremap msync munlock munmap nanosleep newfstatat open openat openat2 pause pipe pipe2 poll ppoll pread64 preadv preadv2
pselect6 pwrite64 pwritev pwritev2 read readlink readlinkat readv recvfrom recvmsg rename renameat renameat2
restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_yield select
sendfile sendmsg sendto set_robust_list set_tid_address setitimer setrlimit setsockopt shutdown sigaltstack signalfd4
splice stat statfs statx symlink symlinkat sysinfo tee time timer_create timer_delete timer_getoverrun
timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times ugetrlimit umask uname unlink unlinkat
wait4 waitid write writev
"""
_ALLOWED_IN_NAMESPACES = "chmod fchmod fchmodat fchmodat2 kill tgkill tkill utime utimensat utimes"
"""Harmless only to a program that sees neither files nor processes of the machine."""
_CLONE_THREAD = 0x10000
_FCNTL_COMMANDS = (
    fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL,
    fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW,
)  # fmt: skip
"""Not F_SETOWN and F_SETSIG, which send signals to other processes."""
_IOCTLS = (termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX)
_PR_SET_NAME = 15
_SOCKET_TYPE_MASK = 0xF


@lru_cache(maxsize=2)
def program_filter(*, in_namespaces: bool) -> bytes:
    """Return the filter as a BPF program for this machine's architecture.

    Args:
        in_namespaces: the program has its own process ids and file system.

    Raises:
        ImportError: pyseccomp or libseccomp is missing.

    """
    try:
        import pyseccomp as seccomp  # noqa: PLC0415 - needs a library of the system
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "system calls cannot be filtered: install pyseccomp and libseccomp (Debian: libseccomp2)"
        ) from error
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))

    def allow(name: str, *conditions: Any) -> None:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # else this architecture, or this libseccomp, does not have it
            rules.add_rule(seccomp.ALLOW, number, *conditions)

    for name in f"{_ALLOWED} {_ALLOWED_IN_NAMESPACES if in_namespaces else ''}".split():
        allow(name)
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    # A pair of datagram sockets could send to a socket outside.
    family = seccomp.Arg(0, seccomp.EQ, socket.AF_UNIX)
    allow("socketpair", family, seccomp.Arg(1, seccomp.MASKED_EQ, _SOCKET_TYPE_MASK, socket.SOCK_STREAM))
    allow("prlimit64", seccomp.Arg(0, seccomp.EQ, 0))
    allow("prctl", seccomp.Arg(0, seccomp.EQ, _PR_SET_NAME))
    for command in _FCNTL_COMMANDS:
        allow("fcntl", seccomp.Arg(1, seccomp.EQ, command))
    for request in _IOCTLS:
        allow("ioctl", seccomp.Arg(1, seccomp.EQ, request))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


# --- The ways to isolate a program: bubblewrap, Landlock, none --------------------------------------------------------
# Each lets the program see Python and its libraries, and nothing else of the machine's files.


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


# --- The sandbox ------------------------------------------------------------------------------------------------------


_SHOWN_BYTES = 1_000_000
_PROBE_LIMIT_S = 20.0
_MAX_OPEN_FILES = 256
_MAX_LINE_BYTES = 1 << 16


class SandboxUnavailable(RuntimeError):
    """No isolation works on this machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """CPU time of all its threads, seconds."""
    memory_bytes: int = 512 << 20
    """Address space."""
    file_bytes: int = 16 << 20
    """Limit of each file, of its output, and of all its files together."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program."""

    code: int
    """Its exit code, or 128 plus the signal that ended it."""
    output: str
    errors: str
    timed_out: bool = False
    completed: bool = False
    """True if the program ran to its last statement, and the tests did."""
    unsupported: str = ""
    """Why the tests cannot be run, whatever the program is."""


def run(
    program: str, stdin: str = "", limits: Limits = Limits(), *, isolated: bool = True, tests: str | None = None
) -> Ran:
    """Run a Python program and wait for its exit, or until it has passed or failed its tests.

    Args:
        program: source code.
        stdin: text of its standard input.
        limits: resource limits.
        isolated: False applies only the limits: the program may do what this process's user may do, and processes that
            it starts in their own sessions may outlive it.
        tests: source code that runs after the program's last statement, in a process of its own, and calls the
            program's functions (`remote_calls`). Each process has these limits; `wall_s` is for both together.

    Raises:
        SandboxUnavailable: it cannot be isolated.

    """
    return run_with(available_isolation() if isolated else Isolation.NONE, program, stdin, limits, tests)


@lru_cache(maxsize=1)
def available_isolation() -> Isolation:
    """Return the best isolation that works on this machine.

    Raises:
        SandboxUnavailable: none works.

    """
    reasons = []
    for isolation in (Isolation.BUBBLEWRAP, Isolation.LANDLOCK):
        try:
            ran = run_with(isolation, "", limits=Limits(wall_s=_PROBE_LIMIT_S))
        except (ImportError, OSError) as error:
            reasons.append(f"{isolation}: {error}")
            continue
        if ran.completed and ran.code == 0:
            return isolation
        reasons.append(f"{isolation}: {ran.errors.strip() or f'exit code {ran.code}'}")
    raise SandboxUnavailable(
        f"this machine cannot isolate a program ({'; '.join(reasons)}): install bubblewrap and allow user namespaces, "
        "or use a kernel with Landlock (Linux 5.13); the argument isolated: false runs programs without isolation, for "
        "machines that have nothing to protect"
    )


def run_with(
    isolation: Isolation, program: str, stdin: str = "", limits: Limits = Limits(), tests: str | None = None
) -> Ran:
    """Run a program as `run` does, in a given isolation.

    Raises:
        ImportError: system calls cannot be filtered.
        OSError: the isolation's program is missing.

    """
    with contextlib.ExitStack() as stack:
        start = partial(_start, stack, isolation, limits)
        timer = _Timer(limits.wall_s)
        stack.callback(timer.end)
        if tests is None:
            alone = start({"program": program}, stdin, None)
            timer.covers(alone)
            completed = alone.line() == b"\n"
            alone.wait()
            return alone.result(completed=completed, timed_out=timer.timed_out)
        calls = _text_of(remote_calls.__file__)
        one_end, other_end = socket.socketpair()
        with one_end, other_end:
            judged = start({"program": program, "calls": calls}, stdin, one_end)
            timer.covers(judged)
            if judged.line() != b"\n":
                one_end.close()
                other_end.close()
                judged.wait()
                return judged.result(completed=False, timed_out=timer.timed_out)
            judge = start({"tests": tests, "calls": calls}, "", other_end)
            timer.covers(judge)
        verdict = judge.line()  # of a process that has run no code of the program
        judge.wait()
        found = judged.result(completed=verdict == b'""\n', timed_out=timer.timed_out)
        return replace(found, code=judge.code, unsupported=str(json.loads(verdict)) if verdict else "")


class _Process:
    """A process in its isolation."""

    def __init__(self, child: subprocess.Popen[bytes], channel: socket.socket, output: IO[bytes], errors: IO[bytes]):
        self._child = child
        self._lines = channel.makefile("rb")
        self._channel = channel
        self._output = output
        self._errors = errors
        self._lock = threading.Lock()

    def send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(json.dumps(request).encode() + b"\n")

    def line(self) -> bytes:
        """Return the next line that the script sends, nothing if it has ended."""
        try:
            return self._lines.readline(_MAX_LINE_BYTES)
        except OSError:
            return b""

    def wait(self) -> None:
        """Wait for its exit."""
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """Kill it, and what it started."""
        with self._lock:
            if self._child.returncode is None:  # it is not reaped yet, so its process group is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill and reap it."""
        self.end()
        if self._child.returncode is None:
            self.wait()
            with self._lock:
                self._child.wait()
        self._lines.close()

    def disconnect(self) -> None:
        """Have `line` return: a process that escaped the kill may have the other end."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    @property
    def code(self) -> int:
        """Its exit code, or 128 plus the signal that ended it."""
        self.reap()
        code = self._child.returncode
        return 128 - code if code < 0 else code

    def result(self, *, completed: bool, timed_out: bool) -> Ran:
        """End it and return what it did."""
        return Ran(self.code, _text(self._output), _text(self._errors), timed_out, completed)


class _Timer:
    """Ends processes after a time."""

    def __init__(self, wall_s: float) -> None:
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self.timed_out = False
        self._timer = threading.Timer(wall_s, self._time_out)
        self._timer.start()

    def covers(self, process: _Process) -> None:
        with self._lock:
            self._processes.append(process)
            if self.timed_out:
                process.end()

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def _time_out(self) -> None:
        with self._lock:
            self.timed_out = True
            for process in self._processes:
                process.end()
                process.disconnect()


def _start(
    stack: contextlib.ExitStack,
    isolation: Isolation,
    limits: Limits,
    request: dict[str, Any],
    stdin: str,
    link: socket.socket | None,
) -> _Process:
    """Start a process and send its request; the stack ends it."""
    work = stack.enter_context(tempfile.TemporaryDirectory())
    # Output goes into files, so that the file size limit applies.
    standard_input = stack.enter_context(_file(stdin.encode(errors="replace")))
    output, errors = stack.enter_context(_file()), stack.enter_context(_file())
    is_namespaced = isolation is Isolation.BUBBLEWRAP
    allowed = stack.enter_context(_file(program_filter(in_namespaces=True) if is_namespaced else b""))
    parent, wrapper = os.getpid(), []
    if is_namespaced:
        parent = 0  # bubblewrap ends with us, and the program with it
        wrapper = bubblewrap_command(work, limits.file_bytes, allowed.fileno())
    channel, other_end = socket.socketpair()
    stack.enter_context(channel)
    with other_end:
        descriptors = [other_end.fileno(), *([link.fileno()] if link else [])]
        child = subprocess.Popen(  # noqa: S603 - our own script
            [
                *wrapper,
                *(sys.executable, "-I", "-B", "-c", _text_of(sandbox_child.__file__)),
                *map(str, (descriptors[0], parent, link.fileno() if link else 0)),
            ],
            stdin=standard_input,
            stdout=output,
            stderr=errors,
            pass_fds=[*descriptors, allowed.fileno()],
            cwd=work,
            start_new_session=True,
            env={"PATH": os.defpath, "HOME": work, "OMP_NUM_THREADS": "1"},
        )
    process = _Process(child, channel, output, errors)
    stack.callback(process.reap)
    process.send(
        request
        | {
            "limits": _resource_limits(limits),
            "confine": landlock_request(work) if isolation is Isolation.LANDLOCK else None,
        }
    )
    return process


def _resource_limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }


@lru_cache(maxsize=2)
def _text_of(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


def _file(content: bytes = b"") -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_SHOWN_BYTES).decode(errors="replace")
