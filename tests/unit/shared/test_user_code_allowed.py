"""A job file may name the operator's functions, and none that runs programs or writes files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlboost.shared.job.environment import environment_factory
from rlboost.shared.user_code import allowed
from rlboost.shared.user_code.allowed import USER_MODULES_SETTING, ForbiddenFunction
from rlboost.shared.user_code.functions import load_user_function
from rlboost.shared.user_code.reward_call import describe_import_error, load


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("subprocess:check_output", "standard library"),
        ("os:system", "standard library"),
        ("os.path:join", "standard library"),
        ("builtins:eval", "standard library"),
        ("rlboost.shared.atomic_file:replace_file", "internal to rlboost"),
        ("rlboost.services.trainer.app:Trainer", "internal to rlboost"),
        ("rlboost:client", "internal to rlboost"),
        ("rlboost.rewardsx:score", "internal to rlboost"),
        ("shared.atomic_file:replace_file", "internal to rlboost"),
        ("torch:save", "installed package"),
        ("rlboost.examples.countdown.measure:torch.hub.load", "installed package"),
        ("rlboost.examples.countdown.measure:AutoModelForCausalLM.from_pretrained", "installed package"),
        ("tests.support.forking:sys.exit", "standard library"),
        ("tests.support.forking:os.system", "standard library"),
        ("tests.support.forking:subprocess.Popen", "standard library"),
    ],
)
def test_function_that_does_not_belong_to_the_operator_is_refused(path: str, why: str) -> None:
    with pytest.raises(ForbiddenFunction, match=why):
        load(path)


def test_forbidden_environment_is_not_called(tmp_path: Path) -> None:
    arguments = {"args": ["touch", str(tmp_path / "done")]}
    with pytest.raises(ForbiddenFunction):
        environment_factory("subprocess:check_output", arguments)
    assert not (tmp_path / "done").exists()


def test_forbidden_module_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed_here.py").write_text("import pathlib; pathlib.Path(__file__ + '.imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(allowed, "_installed", lambda: {tmp_path})
    with pytest.raises(Exception, match="installed package"):
        load_user_function("curriculum.function", "installed_here:f", ())
    assert not (tmp_path / "installed_here.py.imported").exists()
    monkeypatch.setenv(USER_MODULES_SETTING, "other, installed_here")
    with pytest.raises(Exception, match="has no 'f'"):
        load("installed_here:f")


@pytest.mark.parametrize(
    "path", ["rlboost.rewards.code:score", "rlboost.examples.countdown.reward:score", "tests.support.jobs:job_file"]
)
def test_function_of_the_operator_or_for_users_is_loaded(path: str) -> None:
    assert callable(load(path))


def test_partial_of_the_operators_function_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def f(a, b): return a + b\nadd, run = functools.partial(f, 1), functools.partial(os.system)\n"
    (tmp_path / "partials.py").write_text(f"import functools, os\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("partials:add")(2) == 3
    with pytest.raises(ForbiddenFunction, match="standard library"):
        load("partials:run")


def test_user_packages_named_like_rlboost_folders_are_loaded(tmp_path: Path) -> None:
    for name in ("services", "shared", "examples", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "reward.py").write_text(f"def score(completions, **_): return {name!r}\n")
    code = (
        "from rlboost.shared.user_code.reward_call import load\n"
        "import rlboost.services.trainer.app\n"
        "print(*[load(f'{n}.reward:score')([]) for n in ('services', 'shared', 'examples', 'tests')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["services", "shared", "examples", "tests"]


def test_refusal_names_the_setting_that_allows_the_function() -> None:
    try:
        load("torch:save")
    except ForbiddenFunction as error:
        text = describe_import_error("torch:save", "reward function", error)
    assert "torch:save is not allowed" in text
    assert f"{USER_MODULES_SETTING}=torch" in text
