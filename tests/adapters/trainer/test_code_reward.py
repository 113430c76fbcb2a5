"""The code reward: real programs in the sandbox, scored by tests and by output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlboost.rewards.code import program_of, score
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
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


CASE = {"input": "1", "output": "1"}


@pytest.mark.parametrize(
    ("test", "cases", "problem"),
    [
        (None, None, "neither tests nor cases"),
        ("", [], "neither tests nor cases"),
        (" \n", None, "tests is no Python"),
        ("# to do", None, "tests is no Python"),
        ("assert (", None, "tests is no Python"),
        ("pass", None, "tests is no Python that asserts"),
        ("def test_it():\n    assert f(1) == 2", None, "outside of functions"),
        (["assert True"], None, "tests is no Python"),
        ("pass\n" * 10**6, None, "tests is no Python"),
        (True, None, "tests is no Python"),
        (float("nan"), [CASE], "tests is no Python"),
        ("assert True", {}, "cases is no list"),
        (None, [None], "cases is no list"),
        (None, [{"input": "1"}], "cases is no list"),
        (None, [{"input": "1", "output": 1}], "cases is no list"),
        (None, [CASE, {"input": None, "output": "1"}], "cases is no list"),
        (None, '[{"input": "1", "output": "1"}]', "cases is no list"),
        (None, CASE, "cases is no list"),
        (None, [{"input": "1" * 10**6}], "cases is no list"),
    ],
)
def test_row_whose_tests_cannot_fail_is_missing_and_named(
    test: Any, cases: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score([fenced("print(1)"), "no program"], tests=[test] * 2, cases=[cases] * 2) == [None, None]
    (line,) = capsys.readouterr().out.splitlines()
    assert problem in line
    assert len(line) < 400


def test_rows_may_have_tests_or_cases_or_both() -> None:
    program = fenced("def f(): return 1\nimport sys\nprint(sys.stdin.read())")
    rows: list[Any] = [("f()", None), ("", [CASE]), (None, [CASE, CASE])]
    for test, cases in rows:
        assert score([program], tests=[test], cases=[cases], isolated=False) == [1.0]


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


ANSWER_FOR_ALL = """
import json, os, stat, sys
def speak(line):
    for n in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(n).st_mode): os.write(n, line)
        except OSError: pass
"""


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        # The lines of the scripts, in all directions, before the tests and while they run.
        (ANSWER_FOR_ALL + "speak(b'\\n\"\"\\n' * 9)\nos._exit(0)", "assert False"),
        (ANSWER_FOR_ALL + "def f(x):\n speak(b'\"\"\\n' * 9)\n os._exit(0)", "assert f(3) == 5"),
        (ANSWER_FOR_ALL + "def f(x):\n speak(b'\"\"\\n')\n return 4", "assert f(3) == 5"),
        (ANSWER_FOR_ALL + 'speak(b\'{"value": ["list", ["f"]], "state": []}\\n\')\nf = 4', "assert f(3) == 5"),
        (ANSWER_FOR_ALL + 'def f(x):\n speak(b\'{"value": 4, "state": []}\\n\')\n os._exit(0)', "assert f(3) == 5"),
        # The objects and frames of its own process, which hold neither the tests nor the verdict.
        (
            (
                "import gc, sys\ndef f(x):\n found = repr([o for o in gc.get_objects() if isinstance(o, str | dict)])\n"
                " frame = sys._getframe()\n while frame: found += repr(frame.f_locals); frame = frame.f_back\n"
                " return 5 if ''.join(['SEC', 'RET']) in found else 4"
            ),
            "assert f(3) == 5, 'SECRET'",
        ),
        # Values that say what the test wants to hear.
        ("class A:\n __eq__ = lambda *_: True\n __ne__ = lambda *_: False\ndef f(x): return A()", "assert f(3) == 5"),
        ("class A(int):\n __eq__ = lambda *_: True\ndef f(x): return A(4)", "assert f(3) == 5"),
        ("class A(list):\n __eq__ = lambda *_: True\ndef f(x): return [A()]", "assert f(3) == [[5]]"),
        ("class A:\n __lt__ = __gt__ = lambda *_: True\ndef f(x): return A()", "assert 4 < f(3) < 6"),
        (
            "class A:\n __contains__ = lambda *_: True\n __iter__ = lambda _: iter(())\nf = lambda x: A()",
            "assert 5 in f(3)",
        ),
        # Names of Python's that it replaces, in its own process only.
        ("def f(x): return 4\ndef abs(x): return 0", "assert abs(f(3) - 5) < 1e-6"),
        ("import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 4", "assert abs(f(3) - 5) < 1e-6"),
        ("class math: isclose = lambda *_: True\ndef f(x): return 4", "assert math.isclose(f(3), 5)"),
        (
            "import math\nmath.isclose = lambda *_: True\ndef f(x): return 4",
            "import math\nassert math.isclose(f(3), 5)",
        ),
        ("import sys\nsys.modules['json'] = None\nsys.setprofile(print)\ndef f(x): return 4", "assert f(3) == 5"),
        # Output and globals, which change with each call.
        (
            "class A(str): __eq__ = lambda *_: True\ndef f(x): global y; y = A('4'); print(y * 10**7)\ny = 4",
            (
                "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as b: f(3)\n"
                "assert b.getvalue() == '5' or y == 5"
            ),
        ),
        ("def f(x): global y; y = A()\nclass A: __eq__ = lambda *_: True\ny = 4", "f(3)\nassert y == 5"),
        ("def f(x): global abs; abs = lambda x: 0; return 4\ny = 1", "assert y and abs(f(3) - 5) < 1"),
        (
            (
                "import sys\ndef f(x):\n frame = sys._getframe()\n"
                " while not hasattr(frame.f_locals.get('self'), '_do'): frame = frame.f_back\n"
                " type(frame.f_locals['self'])._do = lambda *_: {'y': 4, 'want': 4}\n return 4\ny = 4"
            ),
            "want = 5\nr = f(3)\nassert y == 4\nassert r == want",
        ),
        # Ends that look like success.
        ("import os\ndef f(x): os._exit(0)", "try: f(3)\nexcept BaseException: pass"),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)", "assert f(3) == 5"),
        (
            "import os, signal\ndef f(x): os.close(3); os.close(4); os.close(5); return 5",
            "assert f(3) == 5\nassert f(3) == 5",
        ),
        # A function of the tests, as a way into their process.
        (
            (
                "import sys\ndef f(g):\n peer = g.__closure__[1].cell_contents\n"
                " return [peer.ask('getattr', g, '__globals__'), peer.ask('exec', g, 'import os; os._exit(0)')]"
            ),
            "assert f(lambda x: x) == 5",
        ),
    ],
)
def test_program_that_attacks_its_tests_does_not_pass(program: str, tests: str, *, isolated: bool) -> None:
    assert score([fenced(program)], tests=[tests], isolated=isolated) == [0.0]


HUMAN_EVAL = """
METADATA = {'author': 'jt'}
def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False
check(has_close_elements)
"""
CLOSE = """
from typing import List
def has_close_elements(numbers: List[float], threshold: float) -> bool:
    return any(i != j and abs(a - b) < threshold for i, a in enumerate(numbers) for j, b in enumerate(numbers))
"""
FIND_ZERO = """
import math
def poly(xs, x): return sum(coeff * math.pow(x, i) for i, coeff in enumerate(xs))
def find_zero(xs): return -xs[0] / xs[1]
"""
POLYNOMIALS = """
def check(candidate):
    import copy, random
    rng = random.Random(42)
    for _ in range(20):
        coeffs = [rng.randint(-10, 10), rng.randint(1, 10)]
        assert math.fabs(poly(coeffs, candidate(copy.deepcopy(coeffs)))) < 1e-4
check(find_zero)
"""
STACK = """
class Empty(ValueError): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty('nothing')
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (CLOSE, HUMAN_EVAL),
        (FIND_ZERO, POLYNOMIALS),
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25\nassert sum(-10, 5) == -5"),
        (
            "class Solution:\n def two(self, xs): return [0, len(xs)]",
            "check = Solution().two\nassert check([1]) == [0, 1]",
        ),
        (
            STACK,
            (
                "s = Stack()\ns.push(1)\ns.push((2, 'b'))\nassert len(s) == 2 and list(s) == [1, (2, 'b')]\n"
                "assert s.pop() == (2, 'b') and s.items == [1] and isinstance(s, Stack)\ns.pop()\n"
                "try: s.pop()\nexcept Empty as e: assert e.args == ('nothing',)\nelse: assert False"
            ),
        ),
        ("def f(xs): xs.sort(); return xs", "xs = [3, [1], 2][::2]\nassert f(xs) is xs\nassert xs == [2, 3]"),
        (
            "def f(g, xs): return sorted(map(g, xs))",
            "assert f(lambda x: -x, [1, 2]) == [-2, -1]\nassert f(len, ['a']) == [1]",
        ),
        (
            "def f(n):\n while True: yield n; n += 1",
            "from itertools import islice\nassert list(islice(f(2), 3)) == [2, 3, 4]",
        ),
        ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(2)) == 3"),
        ("def f(x): raise KeyError(x)", "try: f(1)\nexcept KeyError as e: assert e.args == (1,)\nelse: assert False"),
        (
            (
                "from collections import *\nfrom fractions import Fraction\nP = namedtuple('P', 'x y')\n"
                "def f(x): return [Counter('aab'), P(1, 2), {1: {2}}, Fraction(1, 3), 2**9999, b'\\0', 1j, deque([1])]"
            ),
            (
                "from collections import *\nfrom fractions import *\nr = f(0)\nassert r[1].x == 1 and r[0]['a'] == 2\n"
                "assert r == [Counter('aab'), (1, 2), {1: {2}}, Fraction(1, 3), 2**9999, b'\\0', 1j, deque([1])]"
            ),
        ),
        (
            "import numpy as np\ndef f(x): return x * 2",
            "assert np.allclose(f(np.eye(2)), [[2, 0], [0, 2]])\nassert f(np.arange(3)).tolist() == [0, 2, 4]",
        ),
        ("def f(n): return f(n - 1) if n else float('nan')", "r = f(9)\nassert r != r"),
        ("def f(e): return str(e('a'))", "assert f(ValueError) == 'a'"),
        ("def sum(x, y): return x + y", "from math import *\nassert sum(floor(1.5), 2) == 3"),
        (
            "def g(x): print('g', x)\ndef f(x, h): print(x, end='é'); h(); g(x)",
            (
                "import io\nfrom contextlib import redirect_stdout\nb = io.StringIO()\n"
                "with redirect_stdout(b): f(3, lambda: print('h'))\nassert b.getvalue() == '3éh\\ng 3\\n'"
            ),
        ),
        (
            "x, seen, last = 0, [], None\ndef inc():\n global x, last\n x += 1; last = [x]; seen.append(last)\n f(0)",
            (
                "try: inc()\nexcept NameError: assert x == 1\n"
                "try: inc()\nexcept NameError: assert (x, seen, last) == (2, [[1], [2]], [2])"
            ),
        ),
        (
            "import sys\ndef f(x): sys.stdout = sys.__stdout__; print(x); return x",
            "assert f(1) == 1\nassert f(2) == 2",
        ),
        # A local name of a function of the tests, and a global of the program.
        ("def area(x): return x", "def t():\n area = 3\n return area\nassert area(3) == t()"),
    ],
)
def test_right_program_passes_its_tests(program: str, tests: str) -> None:
    assert score([fenced(program)], tests=[tests], limits={"wall_s": 60, "cpu_s": 30}) == [1.0]


@pytest.mark.parametrize(
    ("program", "tests", "why"),
    [
        (
            "class A:\n __eq__ = lambda *_: True\ndef f(x): return A()",
            "assert f(1) == A()",
            "compare two objects of the",
        ),
        (
            "class A:\n __sub__ = lambda *_: 0\ndef f(x): return A()",
            "assert abs(f(3) - 5) < 1",
            "calculate with an object",
        ),
        (
            "def sum(a): return a\ndef max(a): return a[0]",
            "assert sum([1]) == max([[1]])",
            "but Python's own: max, sum",
        ),
        ("def max(x): return 1\ndef sum(x): return 0", "assert solve([1]) == sum([1]) + max([0])", ""),
    ],
)
def test_program_whose_answer_cannot_be_judged_fails_alone(
    program: str, tests: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score([fenced(program)], tests=[tests]) == [0.0]
    printed = capsys.readouterr().out
    assert why in printed
    assert bool(why) == bool(printed)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("class T: pass\nf(T())", "give 'T()' to the program"),
        ("class T: pass\nt = T()\nf(1, x=t)", "give 't' to the program"),
        ("def check(g): assert g(x for x in [1]) == 1\ncheck(f)", "give '(x for x in [1])' to the program"),
        ("f(eval)", "give 'eval' to the program"),
        ("class B(A): pass\nassert B()", "derive the class B from one of the program's"),
        ("assert f(", "tests is no Python"),
        ("assert f(1)\nreturn", "tests is no Python"),
    ],
)
def test_tests_that_two_processes_cannot_run_are_missing(
    tests: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score([fenced("class A: pass\nf = str"), "none"], tests=[tests] * 2) == [None, None]
    assert why in capsys.readouterr().out
