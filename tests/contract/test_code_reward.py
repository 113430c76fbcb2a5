"""Programs that nobody has read, run for real: what they may not do, they cannot, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from rlboost.rewards import sandbox
from rlboost.rewards.code import program_of, score
from rlboost.rewards.sandbox import Limits, SandboxUnavailable, probe, run
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.rewards import RewardBatch, Scores
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.waiting import Waits
from tests.support.eventually import eventually


@pytest.fixture
def shut_in() -> None:
    try:
        probe()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def fenced(program: str) -> str:
    return f"I think so:\n```python\n{program}\n```\nThat is it.<eos>"


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("```python\na\n``` or\n```\nb\n```") == "b\n"
    assert program_of("no program") is None
    assert program_of("```python\nnever closed") is None


@pytest.mark.usefixtures("shut_in")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 1), 1)", "unreachable"),
        ("open('/tmp/outside', 'w')", "Read-only file system"),
        ("open('large', 'w').write('x' * 40_000_000)", "No space left"),
        ("x = bytearray(1_000_000_000)", "MemoryError"),
        ("import os; os.kill(1, 9); os.listdir('/proc/1')", "No such file"),
        ("import ctypes; l = ctypes.CDLL(None); assert l.umount2(b'/proc', 2) == 0", "AssertionError"),
        ("while True: print('x' * 10_000)", "File too large"),
    ],
)
def test_sandbox_blocks_network_and_writes(program: str, words: str) -> None:
    ran = run(program)
    assert ran.code != 0
    assert words in ran.errors


@pytest.mark.usefixtures("shut_in")
def test_a_program_reads_its_input_and_writes_files_of_its_own() -> None:
    ran = run("open('a', 'w').write(input()); print(open('a').read() * 2)", "ab")
    assert (ran.code, ran.output, ran.errors, ran.timed_out) == (0, "abab\n", "", False)


@pytest.mark.usefixtures("shut_in")
async def test_nothing_of_a_program_outlives_it_or_its_time() -> None:
    mark = f"mark-{os.getpid()}"
    fork = f"import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['{mark}', '3600'])\n"
    began = time.monotonic()
    assert run(fork + "time.sleep(0.2)").code == 0
    assert run(fork + "time.sleep(3600)", limits=Limits(wall_s=1.0)).timed_out
    assert time.monotonic() - began < 10
    await eventually(lambda: not _running(mark))


def _running(mark: str) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(mark.encode()):
                return True
        except OSError:
            continue
    return False


@pytest.mark.usefixtures("shut_in")
def test_processor_time_has_a_limit_of_its_own() -> None:
    ran = run("while True: pass", limits=Limits(wall_s=20.0, cpu_s=1))
    assert (ran.code, ran.timed_out) == (128 + 9, False)


@pytest.mark.usefixtures("shut_in")
async def test_programs_are_scored_by_tests_and_by_output() -> None:
    pool = RewardPool(RewardSpec(function="rlboost.rewards.code:score", timeout_s=60), Waits())
    await pool.start()
    texts = [
        fenced("def add(a, b): return a + b"),
        fenced("def add(a, b): return a - b"),
        fenced("import sys; sys.exit(0)"),
        "no program",
    ]
    try:
        batch = RewardBatch(["?"] * 4, list(texts), [[1]] * 4, {"tests": ["assert add(2, 2) == 4"] * 4})
        assert await pool.score(batch) == Scores((1.0, 0.0, 0.0, 0.0))
    finally:
        await pool.close()
    cases = [{"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": "2\n"}]
    right, wrong = "print(sum(map(int, input().split())))", "print(5)"
    assert score([fenced(right), fenced(wrong)], cases=[cases] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match="neither a column tests nor a column cases"):
        score([fenced(right)])


@pytest.mark.usefixtures("shut_in")
@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        "import os; print(open('program.py').read().split()[-1]); os._exit(0)",
        "print(open('program.py').read()); raise SystemExit",
        "import os\nfor n in os.listdir('.'): print(open(n).read())\nos._exit(0)",
        "import sys; print(sys.argv, globals().keys(), sys.orig_argv)\nsys.exit(0)",
    ],
)
def test_program_that_prints_its_readable_files_does_not_pass(program: str, *, isolated: bool) -> None:
    assert score([fenced(program)], tests=["assert False"], isolated=isolated) == [0.0]


@pytest.mark.usefixtures("shut_in")
def test_tests_see_the_programs_names_and_classes() -> None:
    program = "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    n: int = 3\n"
    tests = ["assert pickle.loads(pickle.dumps(A())) == A(3)\nassert __name__ == '__main__'"]
    assert score([fenced(program)], tests=tests) == [1.0]


@pytest.mark.usefixtures("shut_in")
async def test_program_ends_with_the_process_that_runs_it() -> None:
    mark = f"orphan-{os.getpid()}"
    code = (
        "from rlboost.rewards.sandbox import Limits, run\n"
        f'run(\'import os; os.execvp("sleep", ["{mark}", "3600"])\', limits=Limits(wall_s=3600))'
    )
    reward = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await eventually(lambda: _running(mark))
    reward.kill()
    await reward.wait()
    await eventually(lambda: not _running(mark))


def test_missing_sandbox_is_an_error_unless_isolation_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sandbox.Ran(sandbox.sandbox_child.UNAVAILABLE, "", "Operation not permitted: unshare")
    monkeypatch.setattr(sandbox, "_run", lambda *_, **__: refused)
    probe.cache_clear()
    with pytest.raises(SandboxUnavailable, match=r"Operation not permitted: unshare.*isolated: false"):
        run("print(1)")
    monkeypatch.undo()
    assert run("print(1)", isolated=False).output == "1\n"
    assert run("while True: pass", limits=Limits(wall_s=0.5), isolated=False).timed_out
