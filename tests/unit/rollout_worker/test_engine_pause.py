"""What a pause requires of the engine, by what the engine has in device memory."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_worker.domain.session import EnginePause


def test_decoding_engine_must_be_suspended_once() -> None:
    pause = EnginePause()
    assert pause.must_suspend(keep_kv=True)
    assert pause.must_suspend(keep_kv=False)
    pause.on_suspended(keep_kv=False)
    assert pause.is_paused
    assert not pause.must_suspend(keep_kv=True)
    assert not pause.must_suspend(keep_kv=False), "it has no memory left to free"


def test_kv_cache_is_freed_by_the_first_pause_that_does_not_keep_it() -> None:
    pause = EnginePause()
    pause.on_suspended(keep_kv=True)
    assert pause.keeps_kv
    assert not pause.must_suspend(keep_kv=True)
    assert pause.must_suspend(keep_kv=False)
    pause.on_suspended(keep_kv=False)
    assert not pause.keeps_kv


@pytest.mark.parametrize("keep_kv", [False, True])
def test_memory_taken_while_paused_is_freed_by_the_next_pause_without_kv(keep_kv: bool) -> None:
    pause = EnginePause()
    pause.on_suspended(keep_kv=keep_kv)
    pause.on_memory_taken()
    assert not pause.must_suspend(keep_kv=True)
    assert pause.must_suspend(keep_kv=False)
    pause.on_suspended(keep_kv=False)
    assert not pause.must_suspend(keep_kv=False)


def test_engine_that_decodes_again_must_be_suspended_again() -> None:
    pause = EnginePause()
    pause.on_suspended(keep_kv=False)
    pause.on_decoding()
    assert not pause.is_paused
    assert pause.must_suspend(keep_kv=True)


def test_only_reason_is_distinguished_from_one_of_two() -> None:
    pause = EnginePause()
    pause.reasons.add("loading")
    assert pause.is_only("loading")
    pause.reasons.add("unsent")
    assert not pause.is_only("loading")
    assert not pause.is_only("unsent")
