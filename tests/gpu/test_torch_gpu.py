"""The torch engine on a GPU: what a CPU cannot show. Run with `pytest -m gpu tests/gpu/test_torch_gpu.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import Qwen3Config  # noqa: E402 - only where torch is

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402 - its like
from rlboost.services.rollout_worker.ports import Engine  # noqa: E402 - its like
from tests.contract.rollout_worker import test_engine_contract as contract  # noqa: E402 - its like
from tests.support import tiny_models  # noqa: E402 - its like
from tests.support.engines import Collector, request, run  # noqa: E402 - its like
from tests.support.eventually import eventually  # noqa: E402 - its like
from tests.support.staged_weights import Staged  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda"
PROMPTS = [[1 + i] * (3 + 4 * i) for i in range(16)]
MIDDLE_SIZED = Qwen3Config(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
MIDDLE_TOKEN_BYTES = 16 * 2 * 8 * 128 * 2
"""Layers, keys and values, kv heads, head dimension, bfloat16."""
Start = Callable[..., Awaitable[TorchEngine]]

# The whole contract once more: its tests use the fixtures of this module.
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})
engine = contract.engine


class OnGpu(contract.Torch):
    async def make(self) -> Engine:
        return TorchEngine(self._directory, slots=contract.SLOTS, device=DEVICE)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")


@pytest.fixture(params=["torch"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> OnGpu:
    if request.param != "torch":
        pytest.skip("another engine")
    return OnGpu(tmp_path)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start engines in bfloat16 that hold a model's weights as version 0; close them at the end."""
    engines: list[TorchEngine] = []

    async def start(model: Any, **settings: Any) -> TorchEngine:
        settings = {"slots": 16, "device": DEVICE, "dtype": "bfloat16", **settings}
        engines.append(TorchEngine(tiny_models.save_config(model.config, tmp_path), **settings))
        await engines[-1].load_weights(0, Staged(weights(model)))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


def rounded(config: Any, seed: int) -> Any:
    """Return a float32 model whose weights lose nothing in bfloat16."""
    model = tiny_models.make(config, seed)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


@cache
def middle_sized() -> Any:
    return tiny_models.make(MIDDLE_SIZED)


def weights(model: Any) -> list[tuple[str, Any]]:
    return [(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)]


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
async def test_bfloat16_logprobs_follow_the_weights_over_an_update(start: Start, name: str) -> None:
    config = tiny_models.CONFIGS[name]
    old, new = rounded(config, 1), rounded(config, 2)
    engine = await start(old)
    asked = [request(i, prompt=prompt, max_tokens=90) for i, prompt in enumerate(PROMPTS)]
    collector = Collector(engine)
    engine.submit(asked)
    await eventually(lambda: engine.stats().tokens_generated_total > 300)
    await engine.load_weights(1, Staged(weights(new)))
    assert all(dict(engine.loaded_tensors())[name].cpu().equal(tensor) for name, tensor in weights(new))
    for one, made in zip(asked, await collector.all_ended(asked), strict=True):
        n = made.versions.index(1)
        for model, of in ((old, slice(n)), (new, slice(n, None))):
            distances = np.abs(np.subtract(made.logprobs, tiny_models.logprobs(model, one.prompt, made.tokens))[of])
            # bfloat16's rounding, which may also give a token of a mixture another expert; the other weights' logprobs
            # would be whole units off
            assert np.mean(distances < 0.3) >= (0.9 if "moe" in name else 1)


async def test_device_memory_stays_within_the_kv_cache_limit(start: Start) -> None:
    limit = 20_000 * MIDDLE_TOKEN_BYTES
    engine = await start(middle_sized(), slots=64, kv_cache_bytes=limit)
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    # Groups of eight; nine samples fit at a time.
    asked = [request(i, prompt=[1 + i // 8] * 1500, max_tokens=600) for i in range(24)]
    collector, running = Collector(engine), 0

    def ended() -> bool:
        nonlocal running
        collector.take_emissions()
        running = max(running, engine.stats().running)
        assert engine.kv_cache_bytes <= limit
        return sum(made.ended for made in collector.of.values()) == len(asked)

    engine.submit(asked)
    await eventually(ended, within_s=300.0, every_s=0.02)
    assert all(len(made.tokens) == 600 and not made.error for made in collector.of.values())
    assert 1 < running <= 9
    passes = 2 << 30
    assert torch.cuda.max_memory_allocated() - idle < limit * 17 // 16 + passes
    assert engine.prefilled_tokens_total <= 5 * 1499, "nine, nine and six run together: of two, two and one groups"


async def test_default_kv_cache_takes_less_than_half_of_the_free_memory(start: Start) -> None:
    engine = await start(middle_sized(), slots=64)
    free, _ = torch.cuda.mem_get_info()
    asked = [request(i, prompt=[1 + i // 8] * 300, max_tokens=40) for i in range(64)]
    assert all(len(made.tokens) == 40 for made in await run(engine, asked))
    assert 0 < engine.kv_cache_bytes < free // 2
    assert engine.prefilled_tokens_total == 8 * 299


async def test_suspended_engine_frees_device_memory_and_resumes(start: Start) -> None:
    engine = await start(middle_sized(), slots=64)
    idle = torch.cuda.memory_allocated()
    asked = [request(i, prompt=[1 + i] * 1000, max_tokens=300) for i in range(32)]
    collector = Collector(engine)
    engine.submit(asked)
    await eventually(lambda: engine.stats().tokens_generated_total > 100, within_s=60.0)
    busy = torch.cuda.memory_allocated()
    await engine.suspend()
    assert engine.kv_cache_bytes == 0
    assert torch.cuda.memory_allocated() - idle < (busy - idle) // 4
    await engine.resume()
    assert all(len(made.tokens) == 300 for made in await collector.all_ended(asked))
