"""When an engine that has something to do counts as hanging."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_worker.domain.load import FIRST_TOKEN_FACTOR, PREFILL_TOKENS_PER_S, HangDetector

LIMIT_S = 10.0


def looks(detector: HangDetector, n: int, *, busy: bool = True, n_generated: int = 0) -> HangDetector:
    for _ in range(n):
        detector.update(busy=busy, n_generated=n_generated, elapsed_s=1.0)
    return detector


@pytest.fixture
def steady() -> HangDetector:
    """Of an engine that has generated its first token."""
    return looks(HangDetector(), 1, n_generated=1)


def test_an_engine_whose_tokens_stop_coming_hangs(steady: HangDetector) -> None:
    assert not looks(steady, 10, n_generated=1).hangs(LIMIT_S)
    assert looks(steady, 1, n_generated=1).hangs(LIMIT_S)
    assert steady.silent_s == 11.0


def test_each_token_resets_the_silence(steady: HangDetector) -> None:
    for n_generated in range(2, 9):
        assert not looks(steady, 9, n_generated=n_generated).hangs(LIMIT_S)


def test_idle_or_paused_engine_never_hangs(steady: HangDetector) -> None:
    assert not looks(steady, 1000, busy=False, n_generated=1).hangs(LIMIT_S)
    assert not looks(steady, 10, n_generated=1).hangs(LIMIT_S), "the silence begins with the work"


def test_first_token_after_a_pause_may_take_longer(steady: HangDetector) -> None:
    steady.on_resume()
    assert not looks(steady, int(FIRST_TOKEN_FACTOR * LIMIT_S), n_generated=1).hangs(LIMIT_S)
    assert looks(steady, 1, n_generated=1).hangs(LIMIT_S)


def test_long_prefill_extends_the_limit(steady: HangDetector) -> None:
    steady.on_submit(int(30 * PREFILL_TOKENS_PER_S))
    steady.on_submit(5)
    assert not looks(steady, 40, n_generated=1).hangs(LIMIT_S)
    assert looks(steady, 1, n_generated=1).hangs(LIMIT_S)
    looks(steady, 1, n_generated=2)
    assert not looks(steady, 30, n_generated=2).hangs(LIMIT_S), "the token may be of a request that ran before"
    looks(steady, 1, n_generated=3)
    assert looks(steady, 11, n_generated=3).hangs(LIMIT_S), "it was read in: the next token takes no longer than any"


def test_counter_reset_of_a_new_engine_does_not_count_as_hanging(steady: HangDetector) -> None:
    looks(steady, 9, n_generated=1)
    assert not looks(steady, 2, n_generated=0).hangs(LIMIT_S)
