"""The system calls that a program in the sandbox may use: an allow-list, as a seccomp filter.

Anything else fails with ENOSYS, as on a kernel that does not have it. Missing are, on purpose: sockets (except pairs),
new processes, other processes' memory and limits, namespaces, mounts, keys, io_uring, and shared memory, which no limit
covers.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import tempfile
import termios
from functools import lru_cache
from typing import Any

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
