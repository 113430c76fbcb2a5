"""A request ends at exactly the token that completes a stop string, however its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.adapters.tokenizer import decoder
from rlboost.services.rollout_worker.domain.requests import Emission, Request
from rlboost.services.rollout_worker.domain.stop_strings import StopStrings
from rlboost.services.rollout_worker.generator import Generator
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP
from tests.support.engines import request
from tests.support.worker_fakes import FakeEngine, FakeEngineFactory, FakeStagedWeights

PIECES = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"aab",
    b" ",
    "é".encode(),
    *("é".encode()[i : i + 1] for i in range(2)),
    b"<",
    b"/a>",
]
"""The bytes of each token: none as of a special token, and parts of a character."""
STOPS = ["ab", "bb", "é", "aaab", "</a>", " a ", "éé"]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def asked(sample: int, stops: Sequence[str], tokens: Sequence[int] = (), **options: Any) -> Request:
    made = request(sample, tokens=tokens, **options)
    return replace(made, sampling=made.sampling.model_copy(update={"stop": tuple(stops)}))


def emission(tokens: Sequence[int], offset: int = 0, finish: int = FINISH_NONE) -> Emission:
    return Emission(
        1, 1, offset, list(tokens), [-float(token) for token in tokens], 0, finish, top_logprobs=bytes(tokens)
    )


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=80),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=80, max_size=80),
    st.integers(0, 79),
)
def test_end_depends_on_the_tokens_alone(tokens: list[int], stops: list[str], sizes: list[int], moved: int) -> None:
    """Neither the sizes of emissions nor a migration matter, and the end is that of the whole text."""
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
    expected = tokens[: next(ends, len(tokens))]
    stopped = any(stop in decode(tokens) for stop in stops)
    strings, found, at, finish = StopStrings(decode), list[int](), 0, FINISH_NONE
    strings.submit([asked(1, stops)])
    for size in sizes:
        (emitted, aborted), at = strings.cut([emission(tokens[at : at + size], at)]), at + size
        for one in emitted:
            assert one.logprobs == [-float(token) for token in one.tokens]
            assert one.top_logprobs == bytes(one.tokens)
            found, finish = found + one.tokens, one.finish
        assert aborted == ([(1, 1)] if emitted and finish else [])
        if at >= moved and finish == FINISH_NONE:
            strings, moved = StopStrings(decode), len(tokens) + 99
            strings.submit([asked(1, stops, found)])
    assert (found, finish) == (expected, FINISH_STOP if stopped else FINISH_NONE)


@pytest.mark.parametrize("finish", [FINISH_LENGTH, FINISH_RELEASED, FINISH_STOP])
def test_stop_string_comes_before_another_end(finish: int) -> None:
    strings = StopStrings(decode)
    strings.submit([asked(1, ["ab"])])
    (one,), aborted = strings.cut([emission([1, 2, 1, 1], finish=finish)])
    assert (one.tokens, one.finish, aborted) == ([1, 2], FINISH_STOP, []), "the engine has ended it itself"


async def fake_generator(stops: Sequence[str]) -> tuple[Generator, FakeEngine]:
    """Return a generator that runs one request with stop strings and one without, which draws the same tokens."""
    factory = FakeEngineFactory(lambda: FakeEngine(slots=4, vocabulary=len(PIECES)))
    generator = Generator(factory, decoder=lambda _: decode)
    await generator.replace_weights(FakeStagedWeights(), 0, lambda: None)
    await generator.resume("loading")
    generator.submit([asked(1, stops, max_tokens=60, seed=7), request(2, max_tokens=60, seed=7)])
    engine = factory.engine
    assert isinstance(engine, FakeEngine)
    return generator, engine


async def test_engine_generates_no_more_after_a_stop_string() -> None:
    generator, engine = await fake_generator(["ab", "bb"])
    while engine.tick():
        pass
    whole = [token for one in engine.take_emissions() if one.sample == 2 for token in one.tokens]
    generator, engine = await fake_generator(["ab", "bb"])
    found: dict[int, list[int]] = {1: [], 2: []}
    finishes = {}
    while engine.tick() and engine.tick() and engine.tick():  # it runs ahead of each take
        for one in generator.take_emissions():
            found[one.sample] += one.tokens
            finishes[one.sample] = one.finish
    for one in generator.take_emissions():
        found[one.sample] += one.tokens
    n = len(found[1])
    assert found == {1: whole[:n], 2: whole}
    assert finishes[1] == FINISH_STOP
    assert any(stop in decode(whole[:n]) for stop in ("ab", "bb"))
    assert not any(stop in decode(whole[: n - 1]) for stop in ("ab", "bb"))
    assert engine.stats().tokens_generated_total < 60 + n + 2 * 3, "it was aborted at the next take"
    assert not generator._stops._completions


async def test_tokens_of_an_aborted_request_end_at_its_stop_string_too() -> None:
    """The last flush of a worker that leaves comes after the abort: the next worker must not continue past the end."""
    generator, engine = await fake_generator(["a"])
    for _ in range(40):
        engine.tick()
    generator.abort([(1, 1), (2, 1)])
    (tokens,) = (one.tokens for one in generator.take_emissions() if one.sample == 1)
    assert "a" in decode(tokens)
    assert "a" not in decode(tokens[:-1])
    engine.tick()
    generator.take_emissions()
    assert not generator._stops._completions


async def test_worker_without_a_tokenizer_refuses_stop_strings_by_name() -> None:
    factory = FakeEngineFactory(lambda: FakeEngine(slots=4))
    generator = Generator(factory)
    await generator.replace_weights(FakeStagedWeights(), 0, lambda: None)
    await generator.resume("loading")
    assert "stop" not in generator.capabilities["sampling_options"]
    generator.submit([asked(1, ["ab"])])
    assert isinstance(factory.engine, FakeEngine)
    factory.engine.tick()
    (refused,) = generator.take_emissions()
    assert refused.error == (
        "this worker does not support stop: stop strings need a tokenizer.json in the model's folder, where the "
        "manager reads it"
    )


def test_decoder_needs_a_usable_tokenizer() -> None:
    for text in ("", "{", "[]", '{"model": {"type": "BPE"}}'):
        assert decoder(text) is None
