"""vLLM on a GPU: what a CPU cannot show. Needs `pip install -e '.[dev,vllm]'`; run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support import tiny_models, vllm_engines  # noqa: E402 - only where torch is
from tests.support.engines import Collector, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # vLLM leaves a ZeroMQ context of a closed engine to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KV_CACHE_BYTES = 4 << 30
PROMPTS = [[1 + i] * (3 + 4 * i) for i in range(16)]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    vllm_engines.require(device="cuda")
    yield
    vllm_engines.end_shared()


def build(config: Any, **settings: Any) -> Any:
    settings = {"slots": 16, "device": "cuda", "dtype": "bfloat16", "kv_cache_bytes": KV_CACHE_BYTES, **settings}
    return vllm_engines.build(config, **settings)


def rounded(config: Any, seed: int) -> Any:
    """Return a float32 model whose weights lose nothing in bfloat16."""
    model = tiny_models.make(config, seed)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def weights(model: Any) -> list[tuple[str, Any]]:
    return [(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)]


@pytest.mark.parametrize("tied", [True, False])
async def test_logprobs_follow_the_loaded_weights(tied: bool) -> None:
    config = vllm_engines.config(tied=tied)
    old, new = rounded(config, 1), rounded(config, 2)
    engine = build(config)
    await engine.load_weights(0, Staged(weights(old)))
    asked = [request(i, prompt=prompt, max_tokens=100) for i, prompt in enumerate(PROMPTS)]
    collector = Collector(engine)
    engine.submit(asked)
    await eventually(lambda: engine.stats().tokens_generated_total > 300)
    await engine.load_weights(1, Staged(weights(new)))
    for one, made in zip(asked, await collector.all_ended(asked), strict=True):
        n = made.versions.index(1)
        # bfloat16's rounding; the other weights' logprobs would be whole units off
        assert made.logprobs[:n] == pytest.approx(tiny_models.logprobs(old, one.prompt, made.tokens)[:n], abs=0.3)
        assert made.logprobs[n:] == pytest.approx(tiny_models.logprobs(new, one.prompt, made.tokens)[n:], abs=0.3)
    await engine.close()


async def test_sleeping_engine_frees_the_device_loads_weights_and_resumes() -> None:
    config = vllm_engines.config()
    old, new = rounded(config, 1), rounded(config, 2)
    engine = build(config, enable_sleep=True)
    await engine.load_weights(0, Staged(weights(old)))
    collector, one = Collector(engine), request(1, max_tokens=120)
    engine.submit([one])
    await eventually(lambda: collector.made(1) > 3)
    awake, _ = torch.cuda.mem_get_info()
    await engine.suspend()
    asleep, _ = torch.cuda.mem_get_info()
    assert asleep - awake > KV_CACHE_BYTES // 2
    await engine.load_weights(1, Staged(weights(new)))
    await engine.resume()
    (made,) = await collector.all_ended([one])
    n = made.versions.index(1)
    assert made.logprobs[n:] == pytest.approx(tiny_models.logprobs(new, one.prompt, made.tokens)[n:], abs=0.3)
    await engine.close()


async def test_tensor_parallel_engine_matches_a_single_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    config = vllm_engines.config()
    model = rounded(config, 1)
    engine = build(config, tensor_parallel=2)
    await engine.load_weights(0, Staged(weights(model)))
    (made,) = await run(engine, [request(1, max_tokens=60)])
    assert made.logprobs == pytest.approx(tiny_models.logprobs(model, [3, 1, 4], made.tokens), abs=0.3)
    await engine.close()
