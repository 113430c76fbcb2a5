"""Adapters of several jobs in one vLLM on a CPU, against the merged models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from rlboost.shared.errors import Corrupt, UnsuitableWeights  # noqa: E402 - only where torch is
from rlboost.shared.weights.cache import CachedVersion  # noqa: E402
from rlboost.shared.wire import I32, pack  # noqa: E402
from tests.support import tiny_models, vllm_engines  # noqa: E402
from tests.support.adapter_versions import (  # noqa: E402
    JOBS,
    Shared,
    adapter_tensors,
    pulled_base,
    requests,
    staged_adapter,
)
from tests.support.engines import Collector, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402

pytestmark = vllm_engines.MARKS

SLOTS = 8
LONG = [7 * i % tiny_models.VOCABULARY for i in range(140)]
"""More tokens than a block of vLLM's KV cache has on a CPU: shorter prefixes are never shared."""
TOKENS = 300
"""Of a sample that new weights must find in its middle, also on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _no_vllm_stays() -> AsyncIterator[None]:
    yield
    vllm_engines.end_shared()


@pytest_asyncio.fixture(loop_scope="module")
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    vllm_engines.require()
    config = vllm_engines.config()
    config.max_position_embeddings = len(LONG) + TOKENS + 1
    model = tiny_models.make(config)
    engine = await vllm_engines.start(model.config, slots=SLOTS, max_adapters=len(JOBS), max_adapter_rank=16)
    shared = Shared(model, engine, tmp_path)
    await engine.load_weights(0, CachedVersion(shared.base))
    for job, adapter in JOBS.items():
        await shared.load(job, **adapter)
    yield shared
    await engine.close()


async def test_logprobs_of_each_request_are_those_of_its_merged_model(shared: Shared) -> None:
    asked = requests(3 * SLOTS)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made)
        assert set(made.versions) == {1 if one.job_id else 0}


async def test_given_completions_are_scored_by_the_model_of_their_job_next_to_others(shared: Shared) -> None:
    given = [5 * i % tiny_models.VOCABULARY for i in range(30)]
    forced: dict[str, Any] = {"forced": pack(given, I32), "max_tokens": len(given)}
    asked = [replace(request(i, prompt=LONG[:20], **forced), job_id=job) for i, job in enumerate(["", *JOBS, "a", ""])]
    asked += [replace(one, sample=10 + one.sample) for one in requests(SLOTS)]
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made)
        assert not one.sampling.forced or made.tokens == given


async def test_jobs_share_no_prefix(shared: Shared) -> None:
    for job in ["", *JOBS, "a", ""]:
        asked = replace(request(shared.engine.stats().tokens_generated_total, prompt=LONG), job_id=job)
        (made,) = await run(shared.engine, [asked])
        shared.assert_logprobs(asked, made)


async def test_new_adapter_of_one_job_changes_no_row_of_another(shared: Shared) -> None:
    await shared.assert_new_adapter_changes_no_row_of_another(SLOTS)
    asked = requests(2 * SLOTS)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made)


async def test_requests_that_keep_their_kv_continue_with_the_new_adapter_and_share_it_with_no_other(
    shared: Shared,
) -> None:
    jobs = ["a", "b"]
    kept = [replace(request(i, prompt=LONG, max_tokens=TOKENS), job_id=job) for i, job in enumerate(jobs)]
    collector = Collector(shared.engine)
    shared.engine.submit(kept)
    await eventually(lambda: min(collector.made(0), collector.made(1)) > 3)
    await shared.engine.suspend(keep_kv=True)
    old = shared.models["a"]
    await shared.load("a", version=2, keep_kv=True, seed=9)
    fresh = replace(request(10, prompt=LONG, max_tokens=TOKENS), job_id="a")
    shared.engine.submit([fresh])
    await shared.engine.resume()
    a, b, new = await collector.all_ended([*kept, fresh])
    shared.assert_logprobs(kept[1], b)
    shared.assert_logprobs(fresh, new)
    n_old = a.versions.count(1)
    assert a.versions == [1] * n_old + [2] * (TOKENS - n_old)
    assert 3 < n_old < TOKENS
    before, after = (tiny_models.logprobs(model, LONG, a.tokens) for model in (old, shared.models["a"]))
    assert a.logprobs[:n_old] == pytest.approx(before[:n_old], abs=1e-4)
    for others in (before, after):  # by the new adapter, from keys and values of the old one
        assert max(abs(x - y) for x, y in zip(a.logprobs[n_old:], others[n_old:], strict=True)) > 1e-2


async def test_requests_of_whole_models_keep_their_kv_where_adapters_may_be(shared: Shared, tmp_path: Path) -> None:
    engine, collector = shared.engine, Collector(shared.engine)
    one = replace(request(0, prompt=LONG, max_tokens=TOKENS), job_id="whole")
    await engine.load_adapter("whole", 0, None)
    engine.submit([one])
    await eventually(lambda: collector.made(0) > 3)
    await engine.suspend(keep_kv=True)
    changed = tiny_models.make(vllm_engines.config(), seed=5)
    await engine.load_weights(1, CachedVersion(pulled_base(changed, tmp_path)), keep_kv=True)
    await engine.load_adapter("whole", 1, None, keep_kv=True)
    await engine.resume()
    (made,) = await collector.all_ended([one])
    n_old = made.versions.count(0)
    assert 3 < n_old < TOKENS
    computed_again = tiny_models.logprobs(changed, LONG, made.tokens)[n_old:]
    assert max(abs(x - y) for x, y in zip(made.logprobs[n_old:], computed_again, strict=True)) > 1e-2


async def test_job_begins_without_an_adapter_and_ends_with_none(shared: Shared) -> None:
    engine, collector = shared.engine, Collector(shared.engine)

    def generates(sample: int) -> bool:
        return collector.made(sample) > 3

    for version, adapter in ((2, False), (3, True), (4, False)):
        asked = replace(request(version, max_tokens=120), job_id="c")
        engine.submit([asked])
        await eventually(partial(generates, version))
        if adapter:
            await shared.load("c", version, keep_kv=True, seed=5)
        else:
            assert await engine.load_adapter("c", version, None, keep_kv=True) == []
            shared.models["c"] = shared.model
        fresh = replace(request(10 + version, max_tokens=5), job_id="c")
        engine.submit([fresh])
        made, new = await collector.all_ended([asked, fresh])
        assert made.versions[-1] == version
        shared.assert_logprobs(fresh, new)
        n_old = len(made.tokens) - made.versions.count(version)
        expected = tiny_models.logprobs(shared.models["c"], asked.prompt, made.tokens)
        assert made.logprobs[n_old:] == pytest.approx(expected[n_old:], abs=1e-4)
    await engine.unload_adapter("c")
    await engine.unload_adapter("c")


async def test_scores_and_samples_of_a_suspended_engine_are_those_of_the_job(shared: Shared) -> None:
    await shared.engine.suspend()
    for job, model in shared.models.items():
        ((scored),) = await shared.engine.score([([1, 2, 3], [4, 5, 6])], 0.7, job)
        assert scored == pytest.approx(tiny_models.logprobs(model, [1, 2, 3], [4, 5, 6], 0.7), abs=1e-4)
        (sampled,) = await shared.engine.sample([replace(request(1, max_tokens=5), job_id=job)])
        assert sampled.version == (1 if job else 0)
        expected = tiny_models.logprobs(model, request(1).prompt, sampled.tokens)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)


async def test_load_of_other_weights_drops_all_adapters(shared: Shared) -> None:
    await shared.engine.load_weights(5, CachedVersion(shared.base))
    asked = requests(10)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made, job="")
        assert set(made.versions) == {5}


async def test_one_adapter_more_takes_the_place_of_one_that_is_unloaded_after_it(shared: Shared) -> None:
    jobs = ["a", "b", "c", "d"]
    for version in range(2, 5):
        jobs.append(f"new-{version}")
        await shared.load(jobs[-1], version, seed=version)
        await shared.engine.unload_adapter(jobs.pop(0))
        asked = [replace(request(10 * version + i), job_id=job) for i, job in enumerate(jobs)]
        for one, made in zip(asked, await run(shared.engine, asked), strict=True):
            shared.assert_logprobs(one, made)


async def test_adapter_that_cannot_be_held_is_refused_with_the_reason(shared: Shared, tmp_path: Path) -> None:
    def refusal(**adapter: Any) -> str:
        tensors = adapter_tensors(shared.model, **adapter)
        return str(shared.engine.adapter_refusal(staged_adapter(shared.base, tensors, tmp_path)))

    assert refusal(rank=17) == "its rank 17 is above RLBOOST_WORKER_MAX_ADAPTER_RANK, 16"
    assert refusal(rank=2, targets=("q_proj", "embed_tokens")) == (
        "model.embed_tokens.weight is not a layer that vllm workers adapt: q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj"
    )
    assert refusal(rank=16) == ""


async def test_damaged_adapter_is_not_loaded_and_the_other_jobs_continue(shared: Shared, tmp_path: Path) -> None:
    staged = staged_adapter(shared.base, adapter_tensors(shared.model, seed=8), tmp_path, version=2)
    for chunk in staged._pulled.manifest.chunks():
        (tmp_path / chunk.digest).unlink()
    with pytest.raises(Corrupt):
        await shared.engine.load_adapter("a", 2, staged)
    asked = requests(5)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made)


async def test_adapter_that_vllm_rejects_is_unsuitable(shared: Shared, tmp_path: Path) -> None:
    tensors = adapter_tensors(shared.model, rank=2)
    staged = staged_adapter(shared.base, tensors, tmp_path, version=2)
    staged.rank = 32
    with pytest.raises(UnsuitableWeights, match=r"could not load the adapter of version 2: .*rank 32"):
        await shared.engine.load_adapter("a", 2, staged)
