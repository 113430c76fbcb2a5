from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from rlboost.shared.user_code import MAX_CHARS, describe_error, describe_import_error, load

MODULE = """
def right(text, answer):
    return int(text) == answer

def score(text):
    return right(text, 4)

class Unprintable(Exception):
    def __str__(self):
        raise ValueError

def unprintable():
    raise Unprintable

def deep(n):
    return deep(n - 1) if n else score("x" * 10_000)

def half():
    raise ValueError("\\ud800")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "user_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(importlib.sys.modules, "user_reward", raising=False)  # type: ignore[attr-defined]
    return importlib.import_module("user_reward")


def described(call: str, module: ModuleType, **row: object) -> str:
    try:
        exec(compile(call, "<string>", "exec"), vars(module))
    except Exception as error:  # noqa: BLE001 - what is raised is what is described
        return describe_error(error, row)
    raise AssertionError(f"{call} raised nothing")


def test_describe_error_begins_with_error_and_line_then_row_then_frames(module: ModuleType) -> None:
    head, row, *traceback = described("score('four')", module, prompt="2+2=", answer=4).splitlines()
    assert head == f"ValueError: invalid literal for int() with base 10: 'four' ({module.__file__}:3)"
    assert row == "row: prompt='2+2=', answer=4"
    assert traceback[0] == "Traceback (most recent call last):"
    assert [line.split()[-1] for line in traceback if line.startswith("  File ")][-2:] == ["score", "right"]


def test_describe_error_bounds_long_rows_texts_and_stacks(module: ModuleType) -> None:
    text = described("deep(500)", module, prompt="p" * 100_000, many=list(range(1000)))
    assert len(text) <= MAX_CHARS
    assert "user_reward.py:3)" in text
    assert "in right" in text


def test_describe_error_survives_errors_without_a_text(module: ModuleType) -> None:
    assert described("unprintable()", module).startswith("Unprintable: (its message cannot be formatted")
    assert described("half()", module).startswith(r"ValueError: \ud800")


def test_describe_import_error_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising_module.py").write_text("\n\nundefined_name\n")
    with pytest.raises(NameError) as caught:
        load("raising_module:score", "reward function")
    text = describe_import_error("raising_module:score", "reward function", caught.value)
    assert f"({tmp_path / 'raising_module.py'}:3); fix raising_module" in text
