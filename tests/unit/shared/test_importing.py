"""Importing large libraries."""

from __future__ import annotations

import gc
import importlib.util

import pytest

from rlboost.shared.process.modules import modules_hidden
from rlboost.shared.process.system import gc_paused


def test_gc_paused_resumes_after_a_failed_import() -> None:
    seen: list[bool] = []

    def fail() -> None:
        with gc_paused():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert [*seen, gc.isenabled()] == [False, True]


def test_modules_hidden_affects_only_new_imports() -> None:
    with modules_hidden("this", "gc"):
        importlib.import_module("gc")
        with pytest.raises(ImportError):
            importlib.import_module("this")
    assert importlib.util.find_spec("this") is not None
