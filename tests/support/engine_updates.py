"""What any engine must show over a load of new weights, beside plain forward passes. Imports torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rlboost.services.rollout_worker.ports import Engine
from rlboost.shared.errors import UnsuitableWeights
from tests.support import tiny_models
from tests.support.engines import Collector, request
from tests.support.eventually import eventually
from tests.support.staged_weights import Staged

_TOKENS = 100


async def assert_the_step_of_a_load_parts_old_from_new(
    start: Callable[[Any], Awaitable[Engine]],
    config: Any,
    prompts: Sequence[list[int]],
    near: Callable[[list[float]], Any],
) -> None:
    """Load weights while requests run: every token has the version that made it, and that one's log-probability.

    Args:
        start: gives an engine that holds a model's weights as version 0.
        config: of the model.
        prompts: as many as run at once.
        near: what a list of log-probabilities is compared with.

    """
    old, new = tiny_models.make(config, seed=1), tiny_models.make(config, seed=2)
    engine = await start(old)
    requests = [request(i, prompt=prompt, max_tokens=_TOKENS) for i, prompt in enumerate(prompts)]
    collector = Collector(engine)
    engine.submit(requests)
    await eventually(lambda: engine.stats().tokens_generated_total > 20 * len(prompts))
    await engine.load_weights(1, Staged(tiny_models.weights(new)))
    for asked, made in zip(requests, await collector.all_ended(requests), strict=True):
        n = made.versions.index(1)
        assert n > 0
        assert made.versions == [0] * n + [1] * (_TOKENS - n)
        assert made.logprobs[:n] == near(tiny_models.logprobs(old, asked.prompt, made.tokens)[:n])
        assert made.logprobs[n:] == near(tiny_models.logprobs(new, asked.prompt, made.tokens)[n:])


async def assert_a_failed_load_serves_nothing_until_a_whole_one_succeeds(
    start: Callable[[Any], Awaitable[Engine]], model: Any, near: Callable[[list[float]], Any], reasons: Sequence[str]
) -> None:
    """Load bad weights, then good ones.

    Args:
        start: gives an engine that holds a model's weights as version 0.
        model: whose weights are good.
        near: what a list of log-probabilities is compared with.
        reasons: patterns of the errors about an unknown tensor, a wrong shape, a wider dtype and a missing tensor.

    """
    good = tiny_models.weights(model)
    engine = await start(model)
    name, tensor = good[0]
    bad = [("nonsense", tensor)], [(name, tensor[:1])], [(name, tensor.double())], good[:-1]
    for weights, why in zip(bad, reasons, strict=True):
        with pytest.raises(UnsuitableWeights, match=why):
            await engine.load_weights(1, Staged(weights))
        assert engine.stats().version == -1
    engine.submit([request(1)])
    assert engine.take_emissions() == []
    await engine.load_weights(2, Staged(good))
    (made,) = await Collector(engine).all_ended([request(1)])
    assert set(made.versions) == {2}
    assert made.logprobs == near(tiny_models.logprobs(model, [3, 1, 4], made.tokens))
