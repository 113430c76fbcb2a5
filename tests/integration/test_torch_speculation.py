"""Drafts change how many forward passes the torch engine takes, and nothing of the samples.

Each test compares an engine that drafts as much as it can with one that drafts nothing. What is drafted are the samples
themselves, other samples of their prompts, and nonsense.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.domain.requests import Request  # noqa: E402
from rlboost.services.rollout_worker.domain.speculation import Drafter  # noqa: E402
from rlboost.shared.model.experts import shape_of_routing  # noqa: E402
from tests.support import tiny_models  # noqa: E402
from tests.support.engines import Collected, Collector, FreePasses, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.model_folder import write_character_tokenizer  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402

SLOTS = 24
PROMPT = [5, 6, 7]
Start = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start engines that hold a model's weights as version 0; close them at the end."""
    engines: list[TorchEngine] = []

    async def start(model: Any, drafter: Drafter | None = None, **settings: Any) -> TorchEngine:
        folder = tiny_models.save_config(model.config, tmp_path)
        engine = TorchEngine(folder, slots=SLOTS, drafter=drafter, **settings)
        engines.append(engine)
        weights = tiny_models.weights(model)
        if settings.get("dtype") == "bfloat16":
            weights = [(name, tensor.bfloat16()) for name, tensor in weights]
        await engine.load_weights(0, Staged(weights))
        return engine

    yield start
    for engine in engines:
        await engine.close()


@pytest.fixture
def model() -> Any:
    return tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])


def new_drafter() -> Drafter:
    return Drafter(1024, FreePasses())


def hint(drafter: Drafter, requests: Sequence[Request], samples: Sequence[Collected]) -> None:
    """Let drafts be the samples themselves, the samples with an error in every ninth token, and nonsense."""
    for one, made in zip(requests, samples, strict=True):
        whole = [*one.tokens, *made.tokens]
        drafter.hint(one.prompt, [token + (at % 9 == 8) for at, token in enumerate(whole)])
        drafter.hint(one.prompt, whole)
        drafter.hint(one.prompt, np.random.default_rng(one.sample).integers(0, 90, 40).tolist())


def assert_same(drafted: Collected, plain: Collected) -> None:
    assert drafted.tokens == plain.tokens
    assert (drafted.offset, drafted.finish, drafted.error) == (plain.offset, plain.finish, plain.error)
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert drafted.versions == plain.versions
    assert drafted.routed_experts == plain.routed_experts
    assert len(drafted.top_logprobs) == len(plain.top_logprobs)


async def compare(start: Start, model: Any, requests: Sequence[Request], **settings: Any) -> Drafter:
    """Check that all samples are the same with drafts; return what drafted."""
    drafter = new_drafter()
    plain, drafting = await start(model, **settings), await start(model, drafter, **settings)
    expected = await run(plain, list(requests))
    hint(drafter, requests, expected)
    for made, one in zip(await run(drafting, list(requests)), expected, strict=True):
        assert_same(made, one)
    stats = drafting.stats()
    assert (stats.drafted_total, stats.accepted_total) == (drafter.drafted_total, drafter.accepted_total)
    assert stats.tokens_generated_total == plain.stats().tokens_generated_total
    assert plain.stats().drafted_total == 0
    return drafter


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS | tiny_models.MIXTURES))
async def test_samples_of_every_family_are_the_same_in_fewer_passes(name: str, start: Start) -> None:
    model = tiny_models.make((tiny_models.CONFIGS | tiny_models.MIXTURES)[name])
    requests = [request(i, prompt=[*PROMPT, i // 4], max_tokens=5 + (i * 37) % 90) for i in range(2 * SLOTS)]
    drafter = await compare(start, model, requests)
    n_tokens = sum(one.sampling.max_tokens for one in requests)
    assert n_tokens > 1.5 * (n_tokens - drafter.accepted_total), "tokens per pass"


async def test_routed_experts_are_those_of_the_drawn_tokens(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    shape = shape_of_routing(model.config.to_dict())
    asked = [request(i, prompt=PROMPT, max_tokens=30, routed_experts=tuple(shape)) for i in range(6)]
    assert (await compare(start, model, asked)).accepted_total


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "logit_bias": {"logit_bias": ((5, 4.0), (9, -100.0))},
    "min_tokens": {"min_tokens": 20, "stop": [9, 10, 11, 12, 13, 14]},
    "stop": {"stop": [9, 10, 11, 12]},
    "top_logprobs": {"top_logprobs": 3},
}


async def test_samples_with_any_option_are_the_same_in_one_batch(start: Start, model: Any) -> None:
    requests = [
        request(4 * i + j, prompt=[*PROMPT, i], max_tokens=60, **options)
        for i, options in enumerate(OPTIONS.values())
        for j in range(4)
    ]
    assert (await compare(start, model, requests)).accepted_total > 400


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_samples_with_an_option_are_the_same(start: Start, model: Any, options: dict[str, Any]) -> None:
    requests = [request(i, prompt=PROMPT, max_tokens=60, **options) for i in range(6)]
    assert (await compare(start, model, requests)).accepted_total


@pytest.mark.filterwarnings("ignore:When constructing TokenizerInfo:UserWarning")
async def test_samples_with_a_grammar_are_the_same_without_drafts(start: Start, model: Any, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    from rlboost.services.rollout_manager.serving.structured import (  # noqa: PLC0415 - only where xgrammar is
        grammar,
        json_form,
    )
    from rlboost.services.rollout_worker.adapters.tokenizer import tokenizer_for_grammars  # noqa: PLC0415 - as above

    tokenizer = tokenizer_for_grammars(
        (write_character_tokenizer(tmp_path / "tokenizer") / "tokenizer.json").read_text()
    )
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    structured = grammar(json_form(schema), [])
    requests = [request(i, prompt=PROMPT, max_tokens=50, stop=[2], grammar=structured) for i in range(3)]
    requests += [request(3 + i, prompt=PROMPT, max_tokens=50) for i in range(3)]
    assert (await compare(start, model, requests, tokenizer_json=tokenizer)).accepted_total


async def test_bfloat16_on_a_cpu_gives_the_same_bits(start: Start, model: Any) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    drafter, requests = new_drafter(), [request(i, prompt=PROMPT, max_tokens=80) for i in range(8)]
    plain, drafting = await start(model, dtype="bfloat16"), await start(model, drafter, dtype="bfloat16")
    expected = await run(plain, requests)
    hint(drafter, requests, expected)
    for made, one in zip(await run(drafting, requests), expected, strict=True):
        assert (made.tokens, made.logprobs) == (one.tokens, one.logprobs)
    assert drafter.accepted_total > 300


async def test_sample_resumed_at_any_offset_is_the_same(start: Start, model: Any) -> None:
    (whole,) = await run(await start(model), [request(1, prompt=PROMPT, max_tokens=60)])
    resumed = [
        request(1, attempt=2 + n, prompt=PROMPT, max_tokens=60, tokens=whole.tokens[:n]) for n in range(0, 60, 7)
    ]
    assert (await compare(start, model, resumed)).accepted_total


async def test_long_prompts_joining_and_leaving_are_the_same(start: Start, model: Any) -> None:
    prompts = [np.random.default_rng(n % 4).integers(0, 90, 3 + 25 * (n % 4)).tolist() for n in range(3 * SLOTS)]
    requests = [request(n, prompt=prompt, max_tokens=3 + n % 50) for n, prompt in enumerate(prompts)]
    drafter = await compare(start, model, requests)
    assert drafter.n_states == 0


async def test_cancelled_and_released_samples_change_no_other(start: Start, model: Any) -> None:
    requests = [request(i, prompt=PROMPT, max_tokens=150) for i in range(8)]
    expected = await run(await start(model), requests)
    drafter = new_drafter()
    hint(drafter, requests, expected)
    engine = await start(model, drafter)
    collector = Collector(engine)
    engine.submit(requests)
    await eventually(lambda: collector.made(1) > 3)
    engine.abort([(2, 1), (3, 1)])
    engine.release([(1, 1)])
    collector.take_emissions()
    part = collector.of[1, 1]
    rest = request(1, attempt=2, prompt=PROMPT, max_tokens=150, tokens=part.tokens)
    engine.submit([rest])
    for one, made in zip(requests[4:], await collector.all_ended(requests[4:]), strict=True):
        assert_same(made, expected[one.sample])
    (resumed,) = await collector.all_ended([rest])
    assert part.tokens + resumed.tokens == expected[1].tokens
    for cancelled in (2, 3):
        made = collector.of[cancelled, 1]
        assert made.tokens == expected[cancelled].tokens[: len(made.tokens)]
    await eventually(lambda: drafter.n_states == 0)


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_drafts_of_older_weights_are_only_drafts(start: Start, model: Any, keep_kv: bool) -> None:
    new = tiny_models.make(model.config, seed=3)
    drafter = new_drafter()
    engine = await start(model, drafter)
    requests = [request(i, prompt=PROMPT, max_tokens=100) for i in range(4)]
    hint(drafter, requests, await run(await start(model), requests))
    collector = Collector(engine)
    engine.submit(requests)
    await eventually(lambda: collector.made(1) > 20)
    await engine.suspend(keep_kv=keep_kv)
    await engine.load_weights(1, Staged(tiny_models.weights(new)), keep_kv=keep_kv)
    await engine.resume()
    for one, made in zip(requests, await collector.all_ended(requests), strict=True):
        n = made.versions.index(1)
        assert n > 0  # with drafts, samples proceed unevenly
        old_logprobs = tiny_models.logprobs(model, one.prompt, made.tokens)
        assert made.logprobs[:n] == pytest.approx(old_logprobs[:n], abs=1e-4)
        if not keep_kv:
            new_logprobs = tiny_models.logprobs(new, one.prompt, made.tokens)
            assert made.logprobs[n:] == pytest.approx(new_logprobs[n:], abs=1e-4)
    # The same as on an engine that has never drafted and has these tokens when it loads the weights.
    if not keep_kv:
        made = collector.of[1, 1]
        n = made.versions.index(1)
        other = await start(new)
        (rest,) = await run(other, [request(1, prompt=PROMPT, max_tokens=100, tokens=made.tokens[:n])])
        assert made.tokens[n:] == rest.tokens


async def test_hint_for_a_sample_is_a_draft_of_all_of_its_prompt(start: Start, model: Any) -> None:
    requests = [request(i, prompt=PROMPT, max_tokens=100) for i in range(2)]
    expected = await run(await start(model), requests)
    drafter = new_drafter()
    engine = await start(model, drafter)
    assert engine.stats().uses_drafts
    await engine.suspend()
    engine.submit(requests)
    engine.hint([(0, one.tokens) for one in expected])
    engine.hint([(5, [1, 2, 3])])
    await engine.resume()
    for made, one in zip(await Collector(engine).all_ended(requests), expected, strict=True):
        assert_same(made, one)
    assert drafter.accepted_total > 150


async def test_sample_at_the_models_maximum_length_is_the_same(start: Start, model: Any) -> None:
    requests = [request(i, prompt=[4] * (tiny_models.MAX_LEN - 20), max_tokens=500) for i in range(4)]
    assert (await compare(start, model, requests)).accepted_total


async def test_nan_after_a_draft_ends_no_sample_that_does_not_draw_it(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    poison = tiny_models.VOCABULARY - 1
    model.get_input_embeddings().weight[poison] = torch.nan
    model.lm_head.weight[poison] = 0
    requests = [request(i, prompt=PROMPT, max_tokens=40, logit_bias=((poison, -1e9),)) for i in range(4)]
    plain, drafter = await start(model), new_drafter()
    expected = await run(plain, requests)
    for one, made in zip(requests, expected, strict=True):
        drafter.hint(one.prompt, [*made.tokens[:5], poison, *made.tokens[6:]])
    for drafted, made in zip(await run(await start(model, drafter), requests), expected, strict=True):
        assert_same(drafted, made)


async def test_drafting_engine_stays_within_its_kv_cache(start: Start, model: Any) -> None:
    size = 16 * 48 * 4 * 2 * 2 * 16 * 3
    engine = await start(model, new_drafter(), kv_cache_bytes=size)
    requests = [request(i, prompt=PROMPT, max_tokens=40) for i in range(40)]
    largest = 0

    async def watch() -> None:
        nonlocal largest
        while True:
            largest = max(largest, engine.kv_cache_bytes)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    await run(engine, requests)
    watching.cancel()
    assert 0 < largest <= size
