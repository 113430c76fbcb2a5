"""The code reward: real programs in the sandbox, scored by tests and by output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlboost.rewards.code import program_of, score
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.rewards import RewardBatch, Scores
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits


def fenced(program: str) -> str:
    return f"I think so:\n```python\n{program}\n```\nThat is it.<eos>"


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("```python\na\n``` or\n```\nb\n```") == "b\n"
    assert program_of("no program") is None
    assert program_of("```python\nnever closed") is None


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


async def test_machine_without_isolation_refuses_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the libraries of the system: no bubblewrap on PATH, and a pyseccomp that finds no libseccomp."""
    (tmp_path / "pyseccomp.py").write_text("raise RuntimeError('Unable to find libseccomp')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = RewardPool(RewardSpec(function="rlboost.rewards.code:score"), Waits())
    try:
        with pytest.raises(ConfigError, match=r"this machine cannot isolate a program.*libseccomp2"):
            await pool.start()
    finally:
        await pool.close()


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        "import os; print(open('program.py').read().split()[-1]); os._exit(0)",
        "print(open('program.py').read()); raise SystemExit",
        "import os\nfor n in os.listdir('.'): print(open(n).read())\nos._exit(0)",
        "import sys; print(sys.argv, globals().keys(), sys.orig_argv)\nsys.exit(0)",
        # The protocol's first answer, written to every descriptor without reading the tests.
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'\\n' * 33)\n    except OSError: pass\nos._exit(0)",
        # What files it inherits.
        "import os\nfor n in range(3, 64):\n    try: print(os.pread(n, 4096, 0))\n    except OSError: pass",
    ],
)
def test_program_that_prints_its_readable_files_does_not_pass(program: str, *, isolated: bool) -> None:
    assert score([fenced(program)], tests=["assert False"], isolated=isolated) == [0.0]


def test_tests_see_the_programs_names_and_classes() -> None:
    program = "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    n: int = 3\n"
    tests = ["assert pickle.loads(pickle.dumps(A())) == A(3)\nassert __name__ == '__main__'"]
    assert score([fenced(program)], tests=tests) == [1.0]
