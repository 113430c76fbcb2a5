"""Real vLLM on a CPU against independent forward passes of the same models, and against the torch engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.ports import Engine  # noqa: E402
from rlboost.shared.errors import Corrupt  # noqa: E402
from rlboost.shared.weights.cache import CachedVersion  # noqa: E402
from tests.support import engine_updates, tiny_models, vllm_engines  # noqa: E402
from tests.support.engines import Collector, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.staged_versions import pulled  # noqa: E402
from tests.support.staged_weights import Staged, shard  # noqa: E402

pytestmark = vllm_engines.MARKS

SLOTS = 8
LONG = [7 * i % tiny_models.VOCABULARY for i in range(140)]
"""More tokens than a block of vLLM's KV cache has on a CPU: shorter prefixes are never shared."""
Start = Callable[[Any], Awaitable[Engine]]


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.long)])
def config(request: pytest.FixtureRequest) -> Any:
    """Both kinds, one after the other: starting vLLM takes seconds."""
    vllm_engines.require()
    return vllm_engines.config(tied=request.param == "tied")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _no_vllm_stays() -> AsyncIterator[None]:
    yield
    vllm_engines.end_shared()


@pytest_asyncio.fixture(loop_scope="module")
async def start() -> AsyncIterator[Start]:
    """Start engines that hold a model's weights as version 0; close them at the end."""
    engines: list[Engine] = []

    async def start(model: Any) -> Engine:
        engine = await vllm_engines.start(model.config, slots=SLOTS)
        engines.append(engine)
        await engine.load_weights(0, Staged(tiny_models.weights(model)))
        return engine

    yield start
    for engine in engines:
        await engine.close()


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, tiny_models.VOCABULARY, 1 + 4 * i).tolist() for i in range(n)]


def near(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=5e-5)


async def test_logprobs_equal_those_of_a_plain_forward_pass_before_and_after_an_update(
    config: Any, start: Start
) -> None:
    models = [tiny_models.make(config, seed=1), tiny_models.make(config, seed=2)]
    engine = await start(models[0])
    # twice as many as slots: rows join and leave while others run
    for version, model in enumerate(models):
        if version:
            await engine.load_weights(version, Staged(tiny_models.weights(model)))
        requests = [
            request(i, prompt=prompt, max_tokens=5 + (i * 37) % 60, temperature=(1.0, 0.7, 1.6)[i % 3])
            for i, prompt in enumerate(prompts(2 * SLOTS))
        ]
        for asked, made in zip(requests, await run(engine, requests), strict=True):
            expected = tiny_models.logprobs(model, asked.prompt, made.tokens, asked.sampling.temperature)
            assert made.logprobs == near(expected)
            assert set(made.versions) == {version}


async def test_load_separates_logprobs_of_old_and_new_weights(config: Any, start: Start) -> None:
    await engine_updates.assert_the_step_of_a_load_parts_old_from_new(start, config, prompts(SLOTS), near)


async def test_prefix_of_older_weights_is_not_reused(config: Any, start: Start) -> None:
    old, new = tiny_models.make(config, seed=1), tiny_models.make(config, seed=2)
    engine = await start(old)
    await run(engine, [request(1, prompt=LONG)])
    await engine.load_weights(1, Staged(tiny_models.weights(new)))
    (made,) = await run(engine, [request(2, prompt=LONG)])
    assert made.logprobs == near(tiny_models.logprobs(new, LONG, made.tokens))


async def test_kept_keys_and_values_are_not_shared_with_new_requests(config: Any, start: Start) -> None:
    old, new = tiny_models.make(config, seed=1), tiny_models.make(config, seed=2)
    engine = await start(old)
    collector = Collector(engine)
    kept = [request(i, prompt=prompt, max_tokens=100) for i, prompt in enumerate(prompts(4))]
    long = request(10, prompt=LONG, max_tokens=20)
    engine.submit([*kept, long])
    await eventually(lambda: collector.made(10) > 3)
    await engine.suspend(keep_kv=True)
    await engine.load_weights(1, Staged(tiny_models.weights(new)), keep_kv=True)
    await engine.resume()
    fresh = request(11, prompt=LONG, max_tokens=20)
    engine.submit([fresh])
    *mixed, made = await collector.all_ended([*kept, long, fresh])
    assert made.logprobs == near(tiny_models.logprobs(new, LONG, made.tokens))
    assert any({0, 1} <= set(made.versions) for made in mixed), "no request was interrupted"
    for asked, made in zip([*kept, long], mixed, strict=True):
        n = made.versions.count(0)
        assert made.logprobs[:n] == near(tiny_models.logprobs(old, asked.prompt, made.tokens)[:n])
        assert made.logprobs[n:] == near(logprobs_over_old_keys(old, new, asked.prompt, made.tokens, n))


def logprobs_over_old_keys(old: Any, new: Any, prompt: list[int], tokens: list[int], n: int) -> list[float]:
    """Return the logprobs of `tokens[n:]` when all but the newest token before them went through the old weights."""
    ids = torch.tensor([[*prompt, *tokens]])
    first = len(prompt) + n - 1
    cache = old(input_ids=ids[:, :first], use_cache=True).past_key_values if first else None
    logits = new(input_ids=ids[:, first:], past_key_values=cache, use_cache=True).logits[0, :-1].double()
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(tokens[n:])[:, None])[:, 0].tolist()
    return found


async def test_failed_load_serves_nothing_until_a_whole_one_succeeds(config: Any, start: Start) -> None:
    reasons = ("nonsense", "could not load version 1", "would round", "lacks 1 weights of the model, such as")
    model = tiny_models.make(config)
    await engine_updates.assert_a_failed_load_serves_nothing_until_a_whole_one_succeeds(start, model, near, reasons)


def flip_a_bit(chunk: Path) -> None:
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)


def truncate(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:1000])


async def test_damaged_cache_is_corrupt_and_the_next_load_serves(config: Any, start: Start, tmp_path: Path) -> None:
    model = tiny_models.make(config)
    engine = await start(model)
    version = pulled((shard(*item) for item in tiny_models.weights(model)), tmp_path)
    weights, chunk = CachedVersion(version), tmp_path / next(version.manifest.chunks()).digest
    good = chunk.read_bytes()
    for damage, why in (
        (flip_a_bit, "are not the published ones"),
        (truncate, "is truncated"),
        (Path.unlink, "is no longer in the cache"),
    ):
        damage(chunk)
        with pytest.raises(Corrupt, match=f"could not load version 1: .*{why}"):
            await engine.load_weights(1, weights)
        assert engine.stats().version == -1
    chunk.write_bytes(good)
    await engine.load_weights(1, weights)
    (made,) = await run(engine, [request(1)])
    assert made.logprobs == near(tiny_models.logprobs(model, [3, 1, 4], made.tokens))


async def test_greedy_tokens_and_logprobs_match_transformers(config: Any, start: Start) -> None:
    model = tiny_models.make(config)
    engine = await start(model)
    requests = [request(i, prompt=p, max_tokens=40, temperature=0.0, top_p=0.5) for i, p in enumerate(prompts(4))]
    for asked, made in zip(requests, await run(engine, requests), strict=True):
        ids = torch.tensor([asked.prompt])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert made.tokens == own[0, ids.shape[1] :].tolist()
        assert made.logprobs == near(tiny_models.logprobs(model, asked.prompt, made.tokens))


async def test_greedy_sample_resumes_identically_in_the_torch_engine(config: Any, start: Start, tmp_path: Path) -> None:
    model = tiny_models.make(config)
    vllm, torch_engine = await start(model), TorchEngine(tiny_models.save_config(config, tmp_path), slots=SLOTS)
    await torch_engine.load_weights(0, Staged(tiny_models.weights(model)))
    asked = [
        request(i, seed=i - 3, prompt=prompt, max_tokens=60, temperature=0.0) for i, prompt in enumerate(prompts(SLOTS))
    ]
    whole = await run(vllm, asked)
    rest = await run(
        torch_engine,
        [
            request(
                one.sample,
                attempt=2,
                seed=one.seed,
                prompt=one.prompt,
                tokens=made.tokens[:25],
                max_tokens=60,
                temperature=one.sampling.temperature,
                top_p=one.sampling.top_p,
            )
            for one, made in zip(asked, whole, strict=True)
        ],
    )
    await torch_engine.close()
    for made, there in zip(whole, rest, strict=True):
        assert made.tokens[25:] == there.tokens
        assert made.logprobs[25:] == near(there.logprobs)


async def test_sample_resumed_at_an_offset_is_the_same_each_time(config: Any, start: Start) -> None:
    engine = await start(tiny_models.make(config))
    (whole,) = await run(engine, [request(5, max_tokens=40)])
    for offset in (0, 11):
        resumed = [request(5, attempt=2 + n, max_tokens=40, tokens=whole.tokens[:offset]) for n in range(2)]
        one, two = await run(engine, resumed)
        assert one.tokens == two.tokens
        assert (one.tokens == whole.tokens[offset:]) is (offset == 0)


async def test_nan_logits_end_the_sample_and_leave_no_trace(config: Any, start: Start) -> None:
    model = tiny_models.make(config)
    poison = tiny_models.VOCABULARY - 1
    model.get_input_embeddings().weight[poison] = torch.nan
    if not config.tie_word_embeddings:
        model.lm_head.weight[poison] = 0
    engine = await start(model)
    poisoned = [request(i, prompt=[1] * 60 + [poison] * 40) for i in range(SLOTS)]
    for made in await run(engine, poisoned):
        assert made.error == "the model's output is not a number"
    if not config.tie_word_embeddings:  # a tied model has not a number among its logits for ever
        healthy = [request(i, attempt=2, top_p=0.5, max_tokens=20) for i in range(SLOTS)]
        for asked, made in zip(healthy, await run(engine, healthy), strict=True):
            assert len(made.tokens) == 20
            assert not made.error, asked


class TestStarting:
    """What is refused before there is an engine, and other ways to start one; none shares a vLLM."""

    @pytest.fixture(autouse=True)
    def alone(self) -> Iterator[None]:
        vllm_engines.require()
        vllm_engines.end_shared()
        yield
        vllm_engines.end_shared()

    @pytest.mark.long
    async def test_too_small_a_cache_only_costs_time(self) -> None:
        config = vllm_engines.config()
        model = tiny_models.make(config)
        # keys and values of five blocks of 128 tokens, where eight samples want two each
        engine = vllm_engines.build(config, slots=SLOTS, kv_cache_bytes=1 << 20)
        assert (engine.kv_tokens, engine.max_request_tokens) == (400, 0), "of 2.5 samples of the longest, 160"
        await engine.load_weights(0, Staged(tiny_models.weights(model)))
        requests = [request(i, prompt=[i], max_tokens=150) for i in range(SLOTS)]
        for asked, made in zip(requests, await run(engine, requests), strict=True):
            assert made.logprobs == near(tiny_models.logprobs(model, asked.prompt, made.tokens))
        await engine.close()

    @pytest.mark.long
    async def test_tensor_parallel_matches_a_plain_forward_pass_after_an_update(self) -> None:
        config = vllm_engines.config()
        old, new = tiny_models.make(config, seed=1), tiny_models.make(config, seed=2)
        engine = vllm_engines.build(config, slots=2, tensor_parallel=2)
        assert engine.kv_tokens > 0
        for version, model in enumerate((old, new)):
            await engine.load_weights(version, Staged(tiny_models.weights(model)))
            (made,) = await run(engine, [request(version, max_tokens=5)])
            assert made.logprobs == near(tiny_models.logprobs(model, [3, 1, 4], made.tokens))
        await engine.close()
