"""A job file may name the operator's user_code, and none that runs programs or writes files."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import rlboost.environments
import rlboost.examples
import rlboost.rewards
from rlboost.shared import user_code
from rlboost.shared.job.environment import environment_factory
from rlboost.shared.job.spec import InvalidJob, parse
from rlboost.shared.user_code import (
    CODE_REWARD,
    OUR_FUNCTIONS,
    UNISOLATED_SETTING,
    USER_MODULES_SETTING,
    ForbiddenFunction,
    InvalidUserFunction,
    Kind,
    check_arguments,
    check_path,
    describe_import_error,
    load,
    load_user_function,
)
from tests.support.jobs import job_file


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("subprocess:check_output", "standard library"),
        ("os:system", "standard library"),
        ("os.path:join", "standard library"),
        ("builtins:eval", "standard library"),
        ("rlboost.shared.files:replace_file", "internal to rlboost"),
        ("rlboost.services.trainer.app:Trainer", "internal to rlboost"),
        ("rlboost:client", "internal to rlboost"),
        ("rlboost.rewardsx:score", "internal to rlboost"),
        ("shared.files:replace_file", "internal to rlboost"),
        ("torch:save", "installed package"),
        ("rlboost.examples.countdown.measure:torch.hub.load", "internal to rlboost"),
        ("rlboost.rewards.code:scores", "did you mean rlboost.rewards.code:score?"),
        ("tests.support.forking:sys.exit", "standard library"),
        ("tests.support.forking:os.system", "standard library"),
        ("tests.support.forking:subprocess.Popen", "standard library"),
        ("benchmarks.rewards:main", "internal to rlboost"),
        ("examples.countdown.reward:score", "internal to rlboost"),
    ],
)
def test_function_that_does_not_belong_to_the_operator_is_refused(path: str, why: str) -> None:
    with pytest.raises(ForbiddenFunction, match=why):
        load(path, "reward function")


def _callables(package: ModuleType) -> Iterator[str]:
    """Yield the paths of all callables of a package, and of the attributes of each."""
    yield from (f"{package.__name__}:{name}" for name in vars(package))
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if info.name.endswith(".test_reward"):  # of the folder that `rlboost init` writes
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            yield f"{info.name}:{name}"
            yield from (f"{info.name}:{name}.{attribute}" for attribute in dir(value) if callable(value))


@pytest.mark.parametrize("package", [rlboost.rewards, rlboost.environments, rlboost.examples])
def test_only_listed_functions_of_our_packages_may_be_named(package: ModuleType) -> None:
    """The packages contain what runs programs, such as `rlboost.rewards.sandbox:run`."""
    for kind in get_args(Kind):
        passed = set()
        for path in _callables(package):
            with contextlib.suppress(ForbiddenFunction):
                check_path(path, kind)
                passed.add(path)
        assert passed == {
            path for path, its_kind in OUR_FUNCTIONS.items() if its_kind == kind and path.startswith(package.__name__)
        }


@pytest.mark.parametrize("path", OUR_FUNCTIONS)
def test_listed_functions_of_our_packages_are_loaded(path: str) -> None:
    assert callable(load(path, OUR_FUNCTIONS[path]))


FORBIDDEN = "rlboost.rewards.sandbox:run"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {"function": FORBIDDEN, "arguments": {"program": "1", "isolated": False}}}, "environment.f"),
        ({"environment": {"function": "rlboost.rewards.code:score"}}, "environment.function"),
        ({"reward": {"function": FORBIDDEN}}, "reward.function"),
        ({"reward": {"function": "rlboost.examples.second_try.environment:SecondTry"}}, "reward.function"),
        ({"reward": {"functions": [{"function": "my:f"}, {"function": "subprocess:run"}]}}, "reward.functions"),
        ({"algorithm": {"loss": FORBIDDEN}}, "algorithm.loss"),
        ({"algorithm": {"loss": "__main__:main"}}, "algorithm.loss"),
        ({"data": {"train": "a.jsonl", "curriculum": {"function": FORBIDDEN}}}, "data.curriculum.function"),
    ],
)
def test_job_that_names_a_forbidden_function_is_rejected(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob, match=f"^{field}.* is not allowed: "):
        parse(job_file(**changes))


def test_function_that_cannot_make_environments_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import pathlib\n"
        "def remove(path): pathlib.Path(path).unlink()\n"
        "def write(path) -> None: pathlib.Path(path).touch()\n"
        "class Writer:\n    def __init__(self, path): pathlib.Path(path).touch()\n"
        "    def reset(self, row, seed): ...\n"
    )
    (tmp_path / "operators.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "written"
    for name, arguments, why in (
        ("remove", {"files": ["a"]}, r"takes \(path\), which environment.arguments do not fit"),
        ("write", {"path": str(path)}, "it returns a NoneType, which has no method reset"),
        ("Writer", {"path": str(path)}, "it is a Writer, which has no method step"),
    ):
        with pytest.raises(InvalidUserFunction, match=why):
            environment_factory(f"operators:{name}", arguments)
    assert not path.exists()


@pytest.mark.parametrize("isolated", [False, 0, None, "", "false", []])
def test_program_without_isolation_needs_the_operators_setting(isolated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForbiddenFunction, match=f"start the trainer with {UNISOLATED_SETTING}=true"):
        check_arguments(CODE_REWARD, {"isolated": isolated})
    check_arguments(CODE_REWARD, {"isolated": True})
    check_arguments("my:f", {"isolated": isolated})
    monkeypatch.setenv(UNISOLATED_SETTING, "true")
    check_arguments(CODE_REWARD, {"isolated": isolated})


def test_forbidden_environment_is_not_called(tmp_path: Path) -> None:
    arguments = {"args": ["touch", str(tmp_path / "done")]}
    with pytest.raises(ForbiddenFunction):
        environment_factory("subprocess:check_output", arguments)
    assert not (tmp_path / "done").exists()


def test_forbidden_module_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed_here.py").write_text("import pathlib; pathlib.Path(__file__ + '.imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "_installed", lambda: {tmp_path})
    with pytest.raises(Exception, match="installed package"):
        load_user_function("curriculum.function", "installed_here:f", (), "curriculum function")
    assert not (tmp_path / "installed_here.py.imported").exists()
    monkeypatch.setenv(USER_MODULES_SETTING, "other, installed_here")
    with pytest.raises(Exception, match="has no 'f'"):
        load("installed_here:f", "reward function")


@pytest.mark.parametrize("how", ["link", "editable"])
def test_package_installed_from_elsewhere_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `uv pip install --link-mode symlink` and `pip install -e` leave it."""
    name = f"installed_as_{how}"
    elsewhere, packages = tmp_path / "cache", tmp_path / "site-packages"
    (elsewhere / name).mkdir(parents=True)
    (elsewhere / name / "__init__.py").write_text("def f(completions): return [1.0]\n")
    packages.mkdir()
    (packages / name).symlink_to(elsewhere / name)
    monkeypatch.setattr(user_code, "_installed", lambda: {packages})
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages if how == "link" else elsewhere)])
    importlib.invalidate_caches()
    with pytest.raises(ForbiddenFunction, match="installed package"):
        load(f"{name}:f", "reward function")
    monkeypatch.syspath_prepend(elsewhere)
    assert callable(load(f"{name}:f", "reward function"))


def test_function_of_the_operator_is_loaded() -> None:
    assert callable(load("tests.support.jobs:job_file", "reward function"))


def test_function_that_a_users_module_only_imports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "importing.py").write_text(
        "from pathlib import Path\nfrom rlboost.rewards.sandbox import run\nfrom yaml import safe_load\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (("run", "internal to rlboost"), ("safe_load", "installed package"), ("Path", "standard library")):
        with pytest.raises(ForbiddenFunction, match=why):
            load(f"importing:{name}", "reward function")
    with pytest.raises(ForbiddenFunction, match="it is a class: name a reward function"):
        load("tests.support.environments:Game", "reward function")


def test_partial_of_the_operators_function_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def f(a, b): return a + b\nadd, run = functools.partial(f, 1), functools.partial(os.system)\n"
    (tmp_path / "partials.py").write_text(f"import functools, os\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("partials:add", "reward function")(2) == 3
    with pytest.raises(ForbiddenFunction, match="standard library"):
        load("partials:run", "reward function")


def test_user_packages_named_like_rlboost_folders_are_loaded(tmp_path: Path) -> None:
    for name in ("services", "shared", "examples", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "reward.py").write_text(f"def score(completions, **_): return {name!r}\n")
    code = (
        "from rlboost.shared.user_code import load\n"
        "import rlboost.services.trainer.app\n"
        "kind, names = 'reward function', ('services', 'shared', 'examples', 'tests')\n"
        "print(*[load(f'{n}.reward:score', kind)([]) for n in names])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["services", "shared", "examples", "tests"]


def test_refusal_names_the_setting_that_allows_the_function() -> None:
    try:
        load("torch:save", "reward function")
    except ForbiddenFunction as error:
        text = describe_import_error("torch:save", "reward function", error)
    assert "torch:save is not allowed" in text
    assert f"{USER_MODULES_SETTING}=torch" in text
