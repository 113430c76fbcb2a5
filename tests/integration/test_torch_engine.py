"""The torch engine against independent forward passes of the same Hugging Face models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import LlamaConfig, MistralConfig, Qwen2Config  # noqa: E402 - only where torch is

from rlboost.services.rollout_worker.adapters.torch import engine as torch_engine  # noqa: E402 - its like
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine, sample  # noqa: E402
from rlboost.services.rollout_worker.adapters.torch.slot_cache import SlotCache  # noqa: E402
from rlboost.services.rollout_worker.domain.parity_check import judge  # noqa: E402
from rlboost.services.rollout_worker.domain.requests import uniforms  # noqa: E402
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts, build_reference  # noqa: E402
from rlboost.shared.errors import StoreUnavailable, UnsuitableWeights  # noqa: E402
from rlboost.shared.wire import F32, pack  # noqa: E402
from tests.support import engine_updates, tiny_models  # noqa: E402
from tests.support.engines import Collector, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402

SLOTS = 24
Start = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture(params=sorted(tiny_models.CONFIGS))
def config(request: pytest.FixtureRequest) -> Any:
    return tiny_models.CONFIGS[request.param]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start engines that hold a model's weights as version 0; close them at the end."""
    engines: list[TorchEngine] = []

    async def start(model: Any, **settings: Any) -> TorchEngine:
        engine = TorchEngine(tiny_models.save_config(model.config, tmp_path), **{"slots": SLOTS, **settings})
        engines.append(engine)
        await engine.load_weights(0, Staged(tiny_models.weights(model)))
        return engine

    yield start
    for engine in engines:
        await engine.close()


def prompts(n: int, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, tiny_models.VOCABULARY, 1 + i * (longest - 1) // max(n - 1, 1)).tolist() for i in range(n)]


async def test_logprobs_equal_those_of_a_plain_forward_pass(config: Any, start: Start) -> None:
    model = tiny_models.make(config)
    engine = await start(model)
    # Lengths and prompts differ, twice as many as slots: rows join, leave, move and are sorted while others run.
    requests = [
        request(i, prompt=prompt, max_tokens=5 + (i * 37) % 90, temperature=(1.0, 0.7, 1.6)[i % 3])
        for i, prompt in enumerate(prompts(2 * SLOTS))
    ]
    for asked, made in zip(requests, await run(engine, requests), strict=True):
        expected = tiny_models.logprobs(model, asked.prompt, made.tokens, asked.sampling.temperature)
        assert made.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama-untied", "qwen3-tied"])
async def test_batch_invariant_bits_depend_on_no_other_request_and_no_earlier_attempt(name: str, start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS[name])
    requests = [
        request(i, prompt=prompt, max_tokens=80 if i % 3 else 11, temperature=(1.0, 0.7)[i % 2], batch_invariant=True)
        for i, prompt in enumerate(prompts(6) * 8)  # groups of eight share a prompt
    ]
    other = [request(100 + i, prompt=[*prompts(6)[5], i], max_tokens=60) for i in range(5)]
    engine = await start(model)
    collector = Collector(engine)
    engine.submit(other)  # their prefixes are computed in passes of another shape
    await eventually(lambda: engine.stats().tokens_generated_total > 2 * len(other))
    engine.submit(requests)
    together = await collector.all_ended(requests)
    expected = tiny_models.logprobs(model, requests[1].prompt, together[1].tokens, 0.7)
    assert together[1].logprobs == pytest.approx(expected, abs=1e-4)
    for asked, made in zip(requests[::7], together[::7], strict=True):
        (alone,) = await run(await start(model), [replace(asked, attempt=2)])
        assert (alone.tokens, alone.logprobs) == (made.tokens, made.logprobs)
        half = len(made.tokens) // 2
        (resumed,) = await run(await start(model), [replace(asked, attempt=3, tokens=made.tokens[:half])])
        assert (resumed.tokens, resumed.logprobs) == (made.tokens[half:], made.logprobs[half:])


async def test_mixture_of_experts_is_not_batch_invariant(start: Start) -> None:
    engine = await start(tiny_models.make(tiny_models.CONFIGS["qwen3-moe"]))
    assert "batch_invariant" not in engine.sampling_options
    (refused,) = await run(engine, [request(1, batch_invariant=True)])
    assert refused.error == (
        "this worker does not support batch_invariant: trainer.deterministic needs torch workers on CPUs and a dense "
        "model"
    )


async def test_long_request_joining_short_ones_keeps_its_prefix(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_SORT_STEPS", 1)
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])
    engine = await start(model)
    # 14 + 4 rows: the long ones lie in two blocks of 16, so that sorting pays at once
    short = [request(i, max_tokens=90) for i in range(14)]
    long = [request(SLOTS + i, prompt=prompts(2, 140)[1], max_tokens=12) for i in range(4)]
    collector = Collector(engine)
    engine.submit(short)
    await eventually(lambda: engine.stats().tokens_generated_total > 2 * SLOTS)
    engine.submit(long)
    for asked, made in zip(short + long, await collector.all_ended(short + long), strict=True):
        assert made.logprobs == pytest.approx(tiny_models.logprobs(model, asked.prompt, made.tokens), abs=1e-4)


async def test_the_token_at_an_offset_is_where_its_uniform_number_falls(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])
    prompt = [5, 6, 7, 8]
    (made,) = await run(await start(model), [request(1, seed=-3, prompt=prompt, max_tokens=80)])
    logits = model(input_ids=torch.tensor([prompt + made.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    cumulative = logits.double().softmax(-1).cumsum(-1).numpy()
    drawn = uniforms(np.full(80, 2**64 - 3, np.uint64), np.arange(80))
    assert made.tokens == [int(np.searchsorted(row, u)) for row, u in zip(cumulative, drawn, strict=True)]


async def test_greedy_decoding_equals_generate(config: Any, start: Start) -> None:
    model = tiny_models.make(config)
    engine = await start(model)
    requests = [request(i, prompt=p, max_tokens=40, temperature=0.0, top_p=0.5) for i, p in enumerate(prompts(8))]
    for asked, made in zip(requests, await run(engine, requests), strict=True):
        ids = torch.tensor([asked.prompt])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert made.tokens == own[0, ids.shape[1] :].tolist()
        # the convention: the model's own distribution, not a certainty
        assert made.logprobs == pytest.approx(tiny_models.logprobs(model, asked.prompt, made.tokens), abs=1e-4)


async def test_load_separates_logprobs_of_old_and_new_weights(config: Any, start: Start) -> None:
    near = partial(pytest.approx, abs=1e-4)
    await engine_updates.assert_the_step_of_a_load_parts_old_from_new(start, config, prompts(SLOTS), near)


async def test_tied_embeddings_stay_tied_and_are_read_back_under_both_names(start: Start) -> None:
    config = tiny_models.CONFIGS["qwen3-tied"]
    new = tiny_models.make(config, seed=2)
    engine = await start(tiny_models.make(config, seed=1))
    assert "lm_head.weight" not in dict(tiny_models.weights(new))
    await engine.load_weights(1, Staged(tiny_models.weights(new)))
    loaded = dict(engine.loaded_tensors())
    assert loaded.keys() == new.state_dict().keys()
    assert all(loaded[name].equal(tensor) for name, tensor in new.state_dict().items())
    (made,) = await run(engine, [request(1, max_tokens=20)])
    assert made.logprobs == pytest.approx(tiny_models.logprobs(new, [3, 1, 4], made.tokens), abs=1e-4)


async def test_later_load_may_contain_only_changed_tensors(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    engine = await start(model)
    model.lm_head.weight.mul_(0.5)
    await engine.load_weights(1, Staged([("lm_head.weight", model.lm_head.weight)]))
    (made,) = await run(engine, [request(1)])
    assert made.logprobs == pytest.approx(tiny_models.logprobs(model, [3, 1, 4], made.tokens), abs=1e-4)


async def test_failed_load_serves_nothing_until_a_whole_one_succeeds(start: Start) -> None:
    reasons = ("no tensor 'nonsense'", r"\(1, 32\).*\(96, 32\)", "would round it", "1 tensors are missing")
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    near = partial(pytest.approx, abs=1e-4)
    await engine_updates.assert_a_failed_load_serves_nothing_until_a_whole_one_succeeds(start, model, near, reasons)


async def test_a_source_that_breaks_off_does_not_kill_the_engine(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    engine = await start(model)

    def breaks_off() -> Any:
        yield tiny_models.weights(model)[0]
        raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        await engine.load_weights(1, Staged(breaks_off()))
    assert engine.stats().version == -1
    await engine.load_weights(1, Staged(tiny_models.weights(model)))
    assert engine.stats().version == 1


async def test_bfloat16_logprobs_are_near_those_of_float32(tmp_path: Path) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    engine = TorchEngine(tiny_models.save_config(model.config, tmp_path), slots=4, dtype="bfloat16")
    await engine.load_weights(0, Staged([(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)]))
    (made,) = await run(engine, [request(1, max_tokens=60)])
    await engine.close()
    assert made.logprobs == pytest.approx(tiny_models.logprobs(model, [3, 1, 4], made.tokens), abs=0.3)


@pytest.mark.parametrize("wrong_layer", [False, True])
async def test_parity_check_finds_one_wrong_layer_in_bfloat16(tmp_path: Path, *, wrong_layer: bool) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    probe = build_canary_prompts(tiny_models.VOCABULARY, temperature=1.0, dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):  # as the trainer computes
        columns = [pack(tiny_models.logprobs(model, *row), F32) for row in probe.rows]
    if wrong_layer:
        down = model.model.layers[1].mlp.down_proj.weight
        down.copy_(down.flip(0))
    engine = TorchEngine(tiny_models.save_config(model.config, tmp_path), slots=4, dtype="bfloat16")
    await engine.load_weights(0, Staged([(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)]))
    await engine.suspend()
    verdict = judge(build_reference(probe, columns), await engine.score(probe.rows, 1.0), precision="bfloat16")
    await engine.close()
    assert verdict.agrees is not wrong_layer, verdict
    assert (verdict.mean < 0.5 * verdict.mean_tolerance) is not wrong_layer, "the tolerance has room"


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        *((1.0, 1.0, 0, 0.0), (0.6, 1.0, 0, 0.0), (1.0, 0.8, 0, 0.0), (1.4, 0.5, 0, 0.0)),
        *((1.0, 1.0, 5, 0.0), (1.0, 1.0, 0, 0.3), (0.7, 0.6, 5, 0.0), (1.0, 0.8, 0, 0.2), (1.0, 1.0, 50, 1.0)),
    ],
)
def test_sampled_frequencies_are_those_of_the_distribution(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    n, vocabulary = 60_000, 20
    logits = torch.linspace(-2, 2, vocabulary).roll(7)
    whole = torch.softmax(logits.double() / temperature, -1)
    ranked = whole.argsort(descending=True)
    kept = ranked[whole[ranked] >= min_p * whole.max()][: top_k or vocabulary]
    kept = kept[whole[kept].cumsum(0) - whole[kept] < top_p * whole[kept].sum()]
    probabilities = torch.zeros_like(whole)
    probabilities[kept] = whole[kept] / whole[kept].sum()

    uniform = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 5))
    settings = np.full(n, temperature, np.float32), np.full(n, top_p)
    limits = np.full(n, top_k), np.full(n, min_p)
    tokens, logprobs = sample(logits.expand(n, -1), *settings, uniform, top_k=limits[0], min_p=limits[1])
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    assert torch.allclose(logprobs.double(), whole[tokens].log(), atol=1e-6)
    chi_square = ((counts - n * probabilities)[possible] ** 2 / (n * probabilities)[possible]).sum()
    assert chi_square < 44, (
        "19 degrees of freedom or fewer: exceeded once in a thousand runs, and there is only this one"
    )


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4, -1)
    top_p = np.array([0.5, 0.51, 0.8001, 1e-9])
    last, logprobs = sample(logits, np.ones(4, np.float32), top_p, np.full(4, 1 - 1e-12))
    assert last.tolist() == [0, 1, 2, 0], "the least likely token that may be drawn"
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.3, 0.15, 0.5], abs=1e-6), "of the whole distribution"


def test_requests_of_one_batch_are_sampled_by_their_own_settings() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    temperature = np.array([0.0, 1.0, 0.5, 0.0, 2.0, 1.0], np.float32)
    top_p = np.array([1.0, 0.3, 1.0, 0.2, 0.9, 1.0])
    uniform = np.linspace(0, 0.999, 6)
    tokens, logprobs = sample(logits, temperature, top_p, uniform)
    for i in range(6):
        own = slice(i, i + 1)
        one, its = sample(logits[own], temperature[own], top_p[own], uniform[own])
        assert one[0] == tokens[i]
        assert its[0] == pytest.approx(float(logprobs[i]), abs=1e-5)
    assert tokens[0] == logits[0].argmax()


async def test_nan_logits_end_the_sample_and_leave_the_slot_clean(start: Start) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama-untied"])
    poison = tiny_models.VOCABULARY - 1
    model.get_input_embeddings().weight[poison] = torch.nan
    model.lm_head.weight[poison] = 0
    engine = await start(model, slots=4)
    poisoned = [request(i, prompt=[1] * 60 + [poison] * 40) for i in range(4)]
    for made in await run(engine, poisoned):
        assert made.error == "the model's output is not a number"
    # Shorter than those whose slots they take: what is left there lies behind their ends.
    healthy = [request(i, attempt=2, top_p=0.5, max_tokens=20) for i in range(4)]
    for made in await run(engine, healthy):
        assert len(made.tokens) == 20
        assert not made.error


_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1), "sliding_attention"),
        (MistralConfig(**_SMALL, sliding_window=16), "sliding_window"),
        (LlamaConfig(**_SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
)
def test_model_unsupported_by_the_cache_is_refused(config: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsuitableWeights, match=rf"{why}.*use the vllm engine"):
        TorchEngine(tiny_models.save_config(config, tmp_path), slots=2)


def test_a_model_whose_configuration_is_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**_SMALL, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsuitableWeights, match=r"the model's weights are quantized \(fp8\)"):
        TorchEngine(tiny_models.save_config(config, tmp_path), slots=2)


def test_a_model_whose_logits_come_out_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = SlotCache.attend

    def off_by_a_little(*args: Any) -> Any:
        return attend(*args) * 1.01

    monkeypatch.setattr(SlotCache, "attend", off_by_a_little)
    with pytest.raises(UnsuitableWeights, match="its logits differ"):
        TorchEngine(tiny_models.save_config(tiny_models.CONFIGS["qwen3-tied"], tmp_path), slots=2)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableWeights, match=r"no causal language model can be built from its config.json"):
        TorchEngine(tmp_path, slots=2)
