"""What the torch engine keeps of its prompts: read once for all that share them, and never more than it may."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.__main__ import _engines  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.adapters.torch import engine as torch_engine  # noqa: E402 - its like
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.adapters.torch.slot_cache import gpu_kv_cache_bytes  # noqa: E402 - likewise
from rlboost.services.rollout_worker.domain.requests import Request  # noqa: E402 - its like
from rlboost.services.rollout_worker.settings import Settings  # noqa: E402 - its like
from rlboost.shared.errors import UnsuitableWeights  # noqa: E402 - its like
from tests.support import tiny_models  # noqa: E402 - its like
from tests.support.engines import Collected, Collector, request, run  # noqa: E402 - its like
from tests.support.eventually import eventually  # noqa: E402 - its like
from tests.support.staged_weights import Staged  # noqa: E402

MODELS = [tiny_models.make(tiny_models.CONFIGS["qwen3-tied"], seed) for seed in range(2)]
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""Layers, keys and values, kv heads, head dimension, float32."""
PROMPT = list(range(1, 41))
READ = len(PROMPT) - 1
"""Of a prompt: the last token goes through the model as the first step of decoding."""

Start = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start engines that hold the first model as version 0; close them at the end."""
    engines: list[TorchEngine] = []

    async def start(**settings: Any) -> TorchEngine:
        engine = TorchEngine(tiny_models.save_config(MODELS[0].config, tmp_path), **{"slots": 16, **settings})
        engines.append(engine)
        await engine.load_weights(0, Staged(tiny_models.weights(MODELS[0])))
        return engine

    yield start
    for engine in engines:
        await engine.close()


def assert_true(asked: Iterable[Request], made: Iterable[Collected]) -> None:
    """Each token has the log-probability that a plain forward pass of its version's weights gives."""
    for one, its in zip(asked, made, strict=True):
        tokens = [*one.tokens, *its.tokens]
        for version, model in enumerate(MODELS):
            plain = tiny_models.logprobs(model, one.prompt, tokens)[len(one.tokens) :]
            of_version = [i for i, v in enumerate(its.versions) if v == version]
            assert [its.logprobs[i] for i in of_version] == pytest.approx([plain[i] for i in of_version], abs=1e-4)


async def test_prompt_of_a_group_is_prefilled_once(start: Start) -> None:
    engine = await start()
    asked = [request(i, prompt=PROMPT) for i in range(8)] + [request(8, prompt=[5, 6]), request(9, prompt=[7])]
    assert_true(asked, await run(engine, asked))
    assert engine.prefilled_tokens_total == READ + 1


async def test_later_sample_copies_the_prompt_of_a_running_one(start: Start) -> None:
    engine = await start()
    collector, first = Collector(engine), request(0, prompt=PROMPT, max_tokens=110)
    engine.submit([first])
    await eventually(lambda: collector.made(0) > 3)
    await engine.suspend(keep_kv=True)
    begins = collector.of[0, 1].tokens[0]
    asked = [
        request(1, prompt=PROMPT),
        request(2, prompt=PROMPT, tokens=[begins ^ 1, 2, 3, 4]),
        request(3, prompt=PROMPT, tokens=[begins ^ 2, 3]),
    ]
    engine.submit(asked)
    await engine.resume()
    assert_true([*asked, first], await collector.all_ended([*asked, first]))
    assert engine.prefilled_tokens_total == READ + 3 + 1, "all but the newest token of what each one has of its own"


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_update_prevents_copies_of_older_keys_and_values(start: Start, keep_kv: bool) -> None:
    engine = await start()
    collector, before = Collector(engine), [request(i, prompt=PROMPT, max_tokens=110) for i in range(4)]
    engine.submit(before)
    await eventually(lambda: engine.stats().tokens_generated_total > 40)
    await engine.suspend(keep_kv=keep_kv)
    collector.take_emissions()
    own = sum(len(made.tokens) for made in collector.of.values())
    await engine.load_weights(1, Staged(tiny_models.weights(MODELS[1])), keep_kv=keep_kv)
    after = [request(i, prompt=PROMPT) for i in range(4, 8)]
    engine.submit(after)
    await engine.resume()
    assert_true(after, await collector.all_ended(after))
    made = await collector.all_ended(before)
    if keep_kv:
        assert engine.prefilled_tokens_total == 2 * READ
    else:
        assert_true(before, made)
        assert 2 * READ < engine.prefilled_tokens_total <= 2 * READ + own, "the prompt and each completion again"


async def test_prefix_longer_than_a_pass_is_prefilled_in_several(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_PREFILL_TOKENS", 16)
    engine = await start()
    asked = [request(i, prompt=PROMPT[i:] * 2, max_tokens=20) for i in range(3)]
    assert_true(asked, await run(engine, asked))
    assert engine.prefilled_tokens_total == sum(len(one.prompt) - 1 for one in asked)


async def test_samples_that_do_not_fit_are_queued(start: Start) -> None:
    limit = 330 * TOKEN_BYTES
    engine = await start(kv_cache_bytes=limit)
    # two of the long ones at a time, or six of the short ones
    long = [request(i, prompt=PROMPT, max_tokens=110) for i in range(3)]
    short = [request(i, prompt=[i, i + 1], max_tokens=40) for i in range(3, 12)]
    asked = [*short[:4], *long, *short[4:]]
    collector, seen = Collector(engine), set()
    engine.submit(asked)

    def ended() -> bool:
        stats = engine.stats()
        collector.take_emissions()
        done = sum(made.ended for made in collector.of.values())
        assert len(asked) - done <= stats.running + stats.pending <= len(asked)
        assert engine.kv_cache_bytes <= limit
        seen.add((stats.running, stats.pending))
        return done == len(asked)

    await eventually(ended, every_s=0.001)
    assert (engine.stats().running, engine.stats().pending) == (0, 0)
    assert max(running for running, _ in seen) <= 6
    assert any(running and pending for running, pending in seen)
    assert_true(asked, [collector.of[one.key] for one in asked])
    firsts = list(collector.of)
    assert firsts.index(long[2].key) > firsts.index(long[0].key)


async def test_sample_that_never_fits_is_refused_alone(start: Start) -> None:
    engine = await start(kv_cache_bytes=64 * TOKEN_BYTES)
    bad, good = await run(engine, [request(1, prompt=PROMPT, max_tokens=100), request(2, max_tokens=60)])
    assert all(part in bad.error for part in ("140 tokens", "64", "RLBOOST_WORKER_KV_CACHE_BYTES"))
    assert len(good.tokens) == 60


async def test_kv_cache_too_small_for_any_sample_is_refused(start: Start) -> None:
    with pytest.raises(
        UnsuitableWeights, match=f"16 tokens of this model need {16 * TOKEN_BYTES}; raise RLBOOST_WORKER_KV"
    ):
        await start(kv_cache_bytes=15 * TOKEN_BYTES)


def test_the_workers_setting_is_the_limit_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_WORKER_KV_CACHE_BYTES", str(15 * TOKEN_BYTES))
    with pytest.raises(UnsuitableWeights, match=f"a KV cache of {15 * TOKEN_BYTES} bytes is too small"):
        _engines(Settings()).build(MODELS[0].config.to_json_string())


async def test_a_suspended_engine_gives_the_memory_back(start: Start) -> None:
    engine = await start()
    collector, one = Collector(engine), request(1, prompt=PROMPT, max_tokens=110)
    engine.submit([one])
    await eventually(lambda: collector.made(1) > 3)
    assert engine.kv_cache_bytes > 0
    await engine.suspend()
    assert engine.kv_cache_bytes == 0
    await engine.resume()
    assert_true([one], await collector.all_ended([one]))


@pytest.mark.parametrize(
    ("free", "allocated", "utilization", "expected"),
    [(60, 10, 0.0, 42), (60, 10, 0.4, 15), (10, 10, 0.4, 7), (60, 40, 0.4, 0)],
)
def test_cache_on_a_gpu_stays_within_its_fraction(free: int, allocated: int, utilization: float, expected: int) -> None:
    """Of a GPU with 80 units: 0.4 are 32, of which the weights take 10; 0.7 of the rest is the cache."""
    assert gpu_kv_cache_bytes(free, 80, allocated, utilization) == expected
