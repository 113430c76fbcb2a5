"""Importing large libraries."""

from __future__ import annotations

import gc
import importlib.util

import pytest

from shared.importing import without, without_collector


def test_the_collector_rests_for_an_import_and_also_works_again_after_one_that_fails() -> None:
    seen: list[bool] = []

    def fail() -> None:
        with without_collector():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert [*seen, gc.isenabled()] == [False, True]


def test_a_module_is_not_found_meanwhile_unless_it_is_there_already() -> None:
    with without("this", "gc"):
        importlib.import_module("gc")
        with pytest.raises(ImportError):
            importlib.import_module("this")
    assert importlib.util.find_spec("this") is not None
