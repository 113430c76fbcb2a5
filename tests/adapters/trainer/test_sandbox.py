"""Programs that attack the machine, run for real in each isolation: what they must not do fails."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost.rewards import sandbox
from rlboost.rewards.sandbox import (
    DEVICES,
    Isolation,
    Limits,
    SandboxUnavailable,
    available_isolation,
    readable_paths,
    run,
    run_with,
)
from tests.support.eventually import eventually
from tests.support.isolations import require

MIB = 1 << 20
ISOLATED = [Isolation.BUBBLEWRAP, Isolation.LANDLOCK]


@pytest.fixture(params=ISOLATED)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    require(request.param)
    return Isolation(request.param)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of the machine with a secret, a listening Unix socket, and a FIFO that has a reader."""
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("SECRET", "secret")
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # readable by its user, whatever ran in this process before
    monkeypatch.chdir(tmp_path)  # the address of a Unix socket is short
    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        stream.bind("stream")
        stream.listen()
        datagrams.bind("datagrams")
        reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        yield tmp_path
        os.close(reader)


ATTACKS = {
    "network": "socket.socket(socket.AF_INET).bind(('127.0.0.1', 0))",
    "unix_socket": "socket.socket(socket.AF_UNIX).connect('stream')",
    "unix_socket_of_a_pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', 'datagrams')",
    "fifo": "os.open('fifo', os.O_WRONLY | os.O_NONBLOCK)",
    "read_file": "open('secret').read()",
    "list_folder": "os.listdir(OUTSIDE)",
    "write_file": "open(OUTSIDE + '/written', 'w')",
    "rename_file": "os.rename('secret', 'renamed'); os.rename('renamed', 'secret')",
    "change_mode": "os.chmod('secret', 0o777)",
    "change_time": "os.utime('secret')",
    "truncate_file": "os.truncate('secret', 0)",
    "environment_of_parent": "open(f'/proc/{PARENT}/environ').read()",
    "memory_of_parent": "open(f'/proc/{PARENT}/mem', 'rb')",
    "signal": "os.kill(PARENT, 0)",
    "signal_by_descriptor": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PARENT)",
    "limits_of_parent": "resource.prlimit(PARENT, resource.RLIMIT_CORE)",
    "priority_of_parent": "os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))",
    "new_process": "os.fork() or os._exit(0); os.wait()",
    "posix_spawn": "os.waitpid(os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {}), 0)",
    "subprocess": "subprocess.run([sys.executable, '-c', ''], check=True)",
    "memory_file": "os.memfd_create('memory')",
    "shared_memory": "assert libc.shmctl(libc.shmget(0, 4096, 0o1600), 0, 0) == 0",
    "message_queue": "assert libc.msgctl(libc.msgget(0, 0o1600), 0, 0) == 0",
    "trace": "assert libc.ptrace(0, 0, 0, 0) == 0",  # the last: each later signal would stop the process
}
"""Attack -> statements that succeed in a process without isolation and without limits."""


PREAMBLE = "import ctypes, fcntl, os, resource, socket, subprocess, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def successes(isolation: Isolation, outside: Path) -> set[str]:
    """Return the attacks that succeed."""
    program = (
        f"{PREAMBLE}OUTSIDE, PARENT = {str(outside)!r}, {os.getpid()}\n"
        "try: os.chdir(OUTSIDE)\nexcept OSError: pass\n"
        f"for name, statement in {ATTACKS!r}.items():\n"
        "    try: exec(statement)\n    except BaseException as error: print(name, repr(error), file=sys.stderr)\n"
        "    else: print(name, flush=True)\n"
    )
    ran = run_with(isolation, program, limits=Limits(wall_s=120, cpu_s=30))
    assert ran.completed, ran.errors
    assert len(ran.output.splitlines()) + len(ran.errors.splitlines()) == len(ATTACKS)
    return set(ran.output.split())


def test_no_attack_succeeds_in_isolation(isolation: Isolation, outside: Path) -> None:
    before = {path: path.stat() for path in outside.iterdir()}
    assert successes(isolation, outside) == set()
    assert {path: path.stat() for path in outside.iterdir()} == before


def test_every_attack_succeeds_without_isolation(outside: Path) -> None:
    """Else the test above could not fail. Some kernels protect the parent's memory always."""
    assert ATTACKS.keys() - successes(Isolation.NONE, outside) <= {"memory_of_parent"}


SYSTEM_CALLS = [
    "unshare(0x10000000)",
    "setns(0, 0)",
    "mount(b'none', b'/', b'tmpfs', 0, None)",
    "umount2(b'/', 2)",
    "chroot(b'/')",
    "process_vm_readv(1, None, 0, None, 0, 0)",
    "syscall(425, 1, bytes(120))",  # io_uring_setup, the same number on all architectures
    "syscall(435, bytes(88), 88)",  # clone3
    "syscall(438, 1, 0, 0)",  # pidfd_getfd
    "syscall(10_000)",
]


def test_privileged_system_calls_are_unknown_to_the_program(isolation: Isolation) -> None:
    program = PREAMBLE + "".join(f"print(libc.{call}, ctypes.get_errno())\n" for call in SYSTEM_CALLS)
    assert run_with(isolation, program).output.splitlines() == [f"-1 {errno.ENOSYS}"] * len(SYSTEM_CALLS)


def test_program_opens_no_device_of_the_machine(isolation: Isolation) -> None:
    devices = [str(path) for path in Path("/dev").rglob("*") if path.is_char_device() or path.is_block_device()]
    program = (
        f"import os\nfor path in {devices!r}:\n"
        "    try: os.open(path, os.O_RDONLY | os.O_NONBLOCK)\n"
        "    except OSError: continue\n"
        "    print(path)"
    )
    ran = run_with(isolation, program)
    assert ran.completed
    assert sorted(ran.output.split()) == sorted(set(DEVICES) & set(devices))


def test_program_sees_only_python_and_an_empty_environment(isolation: Isolation, outside: Path) -> None:
    ran = run_with(isolation, "import os\nprint(sorted(os.environ.keys() - {'PWD'}), os.listdir('.'))")
    assert ran.output == "['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'PATH'] []\n"
    assert not any(outside.is_relative_to(path) for path in readable_paths())


def test_program_cannot_raise_its_limits(isolation: Isolation) -> None:
    program = (
        "import resource\nfor name in ('AS', 'CPU', 'FSIZE'):\n"
        "    try: resource.setrlimit(getattr(resource, f'RLIMIT_{name}'), (-1, -1)); print(name)\n"
        "    except ValueError: pass\n"
    )
    ran = run_with(isolation, program)
    assert (ran.completed, ran.output) == (True, "")


def test_memory_mappings_are_limited_together(isolation: Isolation) -> None:
    program = (
        "import mmap\nparts = []\n"
        "try:\n    while True: parts.append(mmap.mmap(-1, 16 << 20))\n"
        "except OSError: n = len(parts)\n"
        "parts.clear()\nprint(n)"
    )
    ran = run_with(isolation, program, limits=Limits(memory_bytes=256 * MIB))
    assert 1 < int(ran.output) < 16


def test_files_of_a_program_are_limited_together(isolation: Isolation) -> None:
    program = (
        "n = 0\n"
        "for folder in ('/', '/tmp/', '/dev/', ''):\n"
        "    try:\n        while True:\n"
        "            open(folder + str(n), 'wb').write(bytes(1 << 20))\n            n += 1\n"
        "    except OSError: print(n)"
    )
    ran = run_with(isolation, program, limits=Limits(file_bytes=4 * MIB))
    assert ran.output.split() == ["0", "0", "0", "4" if isolation is Isolation.BUBBLEWRAP else "0"]


def test_large_output_ends_the_program(isolation: Isolation) -> None:
    ran = run_with(isolation, "while True: print('x' * 10_000)", limits=Limits(file_bytes=MIB))
    assert "File too large" in ran.errors
    assert len(ran.output) <= MIB


def test_program_reads_input_and_computes_in_threads(isolation: Isolation) -> None:
    program = (
        "import asyncio, concurrent.futures, datetime, tempfile, zoneinfo\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool: print(sum(pool.map(int, input().split())))\n"
        "asyncio.run(asyncio.sleep(0))\nzoneinfo.ZoneInfo('UTC')"
    )
    ran = run_with(isolation, program, "1 2 3")
    assert (ran.code, ran.output, ran.errors, ran.completed) == (0, "6\n", "", True)


def test_tests_and_their_program_share_the_time_limit(isolation: Isolation) -> None:
    for program, tests in (("def f(): 1 / 0", "while True: pass"), ("def f():\n while True: pass", "f()")):
        ran = run_with(isolation, program, limits=Limits(wall_s=3, cpu_s=600), tests=tests)
        assert (ran.timed_out, ran.completed) == (True, False)


def test_program_writes_files_of_its_own_in_bubblewrap() -> None:
    require(Isolation.BUBBLEWRAP)
    program = "import shutil\nopen('a', 'w').write('ab')\nshutil.copy('a', 'b')\nprint(open('b').read())"
    assert run_with(Isolation.BUBBLEWRAP, program).output == "ab\n"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("while True: pass", 128 + 9),
        ("import os; os._exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("import ctypes; ctypes.string_at(0)", 128 + 11),
        ("not python", 1),
    ],
)
def test_exit_code_and_processor_time_are_reported(program: str, code: int, isolation: Isolation) -> None:
    ran = run_with(isolation, program, limits=Limits(wall_s=20.0, cpu_s=1))
    assert (ran.code, ran.timed_out, ran.completed) == (code, False, False)


SURVIVOR = "import os, sys; os.execv(sys.executable, [{mark!r}, '-c', 'import time; time.sleep(3600)'])"


@pytest.mark.parametrize("isolation", [*ISOLATED, Isolation.NONE])
async def test_program_that_sleeps_is_killed_at_its_time(isolation: Isolation) -> None:
    require(isolation)
    mark = f"sleeper-{isolation}-{os.getpid()}"
    program = SURVIVOR.format(mark=mark)
    ran = await asyncio.to_thread(run_with, isolation, program, limits=Limits(wall_s=0.5))
    assert ran.timed_out
    await eventually(lambda: not running(mark))


@pytest.mark.parametrize("isolation", [*ISOLATED, Isolation.NONE])
async def test_program_ends_with_the_process_that_runs_it(isolation: Isolation) -> None:
    require(isolation)
    mark = f"survivor-{isolation}-{os.getpid()}"
    code = (
        "from rlboost.rewards.sandbox import Isolation\nfrom rlboost.rewards.sandbox import Limits, run_with\n"
        f"run_with(Isolation({isolation.value!r}), {SURVIVOR.format(mark=mark)!r}, limits=Limits(wall_s=3600))"
    )
    reward = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        await eventually(lambda: running(mark))
        program = running(mark)
        assert program is not None
        assert isolation is Isolation.NONE or capabilities(program) == [0, 0, 0]
    finally:
        reward.kill()
        await reward.wait()
    await eventually(lambda: not running(mark))


def running(mark: str) -> Path | None:
    """Return the folder in /proc of the process whose command line begins with `mark`."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(mark.encode()):
                return file.parent
    return None


def capabilities(process: Path) -> list[int]:
    lines = (process / "status").read_text().splitlines()
    return [int(line.split()[1], 16) for line in lines if line.startswith(("CapPrm", "CapEff", "CapAmb"))]


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    available_isolation.cache_clear()
    yield
    available_isolation.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
def test_machine_without_bubblewrap_uses_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    require(Isolation.LANDLOCK)
    monkeypatch.setenv("PATH", "/nowhere")
    assert available_isolation() is Isolation.LANDLOCK
    assert run("print(1)").output == "1\n"


CONTAINER = """
import errno, os, pyseccomp
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for name in ("unshare", "setns", "mount", "umount2", "pivot_root"):
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
for namespace in (0x20000, 0x10000000, 0x20000000, 0x40000000):
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, namespace, namespace))
rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
rules.load()
from rlboost.rewards.sandbox import available_isolation, run
print(available_isolation(), run("print(open('/etc/passwd').read())").code)
"""
"""What Docker's default profile forbids."""


def test_container_that_forbids_namespaces_uses_landlock() -> None:
    require(Isolation.LANDLOCK)
    ran = subprocess.run([sys.executable, "-c", CONTAINER], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("landlock 1\n", "")


@pytest.mark.usefixtures("fresh_choice")
def test_machine_without_isolation_refuses_unless_it_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without namespaces and Landlock, as these programs report it."""
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bubblewrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_text_of", lambda file: Path(file).read_text().replace("= 444,", "= 10_000,"))
    script_error = r"bubblewrap: bwrap: No permissions.*landlock: Function not implemented: landlock.*isolated: false"
    with pytest.raises(SandboxUnavailable, match=script_error):
        run("print(1)")
    assert run("print(1)", isolated=False).output == "1\n"
