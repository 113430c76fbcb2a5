"""Adapters of several jobs in one torch engine, against the merged models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.adapters.torch.lora import Adapters  # noqa: E402
from rlboost.services.rollout_worker.domain.speculation import Drafter  # noqa: E402
from rlboost.services.rollout_worker.ports import EngineClosed  # noqa: E402
from rlboost.shared.errors import UnsuitableWeights  # noqa: E402
from rlboost.shared.weights.cache import AdaptedVersion, CachedVersion  # noqa: E402
from rlboost.shared.weights.puller import StoreWeights  # noqa: E402
from tests.support import tiny_models  # noqa: E402
from tests.support.adapter_versions import (  # noqa: E402
    JOBS,
    PROMPTS,
    Shared,
    adapter_tensors,
    pulled_base,
    requests,
    staged_adapter,
)
from tests.support.engines import request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.staged_versions import pulled  # noqa: E402
from tests.support.staged_weights import shard  # noqa: E402
from tests.support.worker_fakes import FakeAdapter  # noqa: E402

SLOTS = 24
Start = Callable[..., Awaitable[Shared]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    engines: list[TorchEngine] = []

    async def start(name: str = "qwen3-tied", **settings: Any) -> Shared:
        model = tiny_models.make(tiny_models.CONFIGS[name])
        folder = tiny_models.save_config(model.config, tmp_path)
        engine = TorchEngine(folder, **{"slots": SLOTS, "max_adapter_rank": 16, **settings})
        engines.append(engine)
        shared = Shared(model, engine, tmp_path)
        await engine.load_weights(0, CachedVersion(shared.base))
        for job, adapter in JOBS.items():
            await shared.load(job, **adapter)
        return shared

    yield start
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize("drafts", [False, True])
async def test_logprobs_of_each_row_are_those_of_its_merged_model(name: str, drafts: bool, start: Start) -> None:
    shared = await start(name, drafter=Drafter(SLOTS) if drafts else None)
    asked = requests(2 * SLOTS)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made)
        assert set(made.versions) == {1 if one.job_id else 0}
    others = [tiny_models.logprobs(model, PROMPTS[0], [3] * 8) for model in shared.models.values()]
    assert all(max(abs(a - b) for a, b in zip(others[0], other, strict=True)) > 1e-2 for other in others[1:])


async def test_new_adapter_of_one_job_changes_no_row_of_another(start: Start) -> None:
    shared = await start()
    await shared.assert_new_adapter_changes_no_row_of_another(20)


async def test_scores_and_samples_of_a_suspended_engine_are_those_of_the_job(start: Start) -> None:
    shared = await start()
    await shared.engine.suspend()
    for job, model in shared.models.items():
        ((scored),) = await shared.engine.score([([1, 2, 3], [4, 5, 6])], 0.7, job)
        assert scored == pytest.approx(tiny_models.logprobs(model, [1, 2, 3], [4, 5, 6], 0.7), abs=1e-4)
        (sampled,) = await shared.engine.sample([replace(request(1, max_tokens=5), job_id=job)])
        expected = tiny_models.logprobs(model, request(1).prompt, sampled.tokens)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)


async def test_batch_invariant_bits_depend_on_no_other_adapter(start: Start) -> None:
    shared = await start()
    asked = requests(2 * SLOTS, batch_invariant=True)
    together = await run(shared.engine, asked)
    alone = await start()
    for job in set(JOBS) - {"c"}:
        await alone.engine.unload_adapter(job)
    for one, made in zip(asked, together, strict=True):
        shared.assert_logprobs(one, made)
    for one, made in [pair for pair in zip(asked, together, strict=True) if pair[0].job_id == "c"][:2]:
        (single,) = await run(alone.engine, [replace(one, attempt=2)])
        assert (single.tokens, single.logprobs) == (made.tokens, made.logprobs)


async def test_load_of_other_weights_drops_all_adapters(start: Start) -> None:
    shared = await start()
    await shared.engine.load_weights(5, CachedVersion(shared.base))
    asked = requests(10)
    for one, made in zip(asked, await run(shared.engine, asked), strict=True):
        shared.assert_logprobs(one, made, job="")
        assert set(made.versions) == {5}


async def test_adapter_that_cannot_be_held_is_refused_with_the_reason(start: Start, tmp_path: Path) -> None:
    shared = await start("qwen3-tied")

    def refusal(**adapter: Any) -> str:
        tensors = adapter_tensors(shared.model, **adapter)
        return str(shared.engine.adapter_refusal(staged_adapter(shared.base, tensors, tmp_path)))

    assert refusal(rank=17) == "its rank 17 is above RLBOOST_WORKER_MAX_ADAPTER_RANK, 16"
    assert refusal(rank=2, targets=("embed_tokens",)) == (
        "model.embed_tokens.weight is not a linear layer of its own in this engine"
    )
    assert refusal(rank=16) == ""


async def test_version_that_is_no_plain_lora_adapter_is_unsuitable(tmp_path: Path) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])
    base, tensors = pulled_base(model, tmp_path), adapter_tensors(model)
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": True})
    version = pulled((shard(*item) for item in tensors.items()), tmp_path, 1, base=base, adapter_json=config)

    class Pulled:
        async def pull(self, *_: object) -> Any:
            return version

    unused: Any = None
    source: Any = Pulled()
    with pytest.raises(UnsuitableWeights, match="use_dora"):
        await StoreWeights(source, unused, unused, unused).pull("a", 1)


def test_layers_of_a_vision_tower_are_not_adapted() -> None:
    tiny_vision = pytest.importorskip("tests.support.tiny_vision", reason="needs PIL", exc_type=ImportError)
    adapters, adapter = Adapters(tiny_vision.make(), 16), FakeAdapter()
    adapter.targets = ("model.language_model.layers.0.mlp.up_proj.weight",)
    assert adapters.refusal(adapter) == ""
    adapter.targets = (tower := "model.visual.blocks.0.attn.qkv.weight",)
    assert adapters.refusal(adapter) == f"{tower} is not a linear layer of its own in this engine"


async def test_adapter_is_verified_in_a_thread_of_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    shared, differing = await start(), AdaptedVersion.factors_differing

    def recorded(version: AdaptedVersion, loaded: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return differing(version, loaded)

    monkeypatch.setattr(AdaptedVersion, "factors_differing", recorded)
    await shared.load("a", 2, seed=9)
    assert threads == ["adapter-verify"]


async def test_adapter_is_unloaded_by_the_close_of_an_engine_that_another_call_occupies(start: Start) -> None:
    """As when a worker changes the model while it checks the weights of another job."""
    shared = await start()
    entered, may_end = threading.Event(), threading.Event()

    def occupy() -> None:
        entered.set()
        assert may_end.wait(60)

    occupied = shared.engine._thread.call(occupy)
    await eventually(entered.is_set)
    unloading = asyncio.create_task(shared.engine.unload_adapter("a"))
    closing = asyncio.create_task(shared.engine.close())
    await eventually(lambda: shared.engine._thread._closing)
    may_end.set()
    await closing
    assert occupied.done()
    with pytest.raises(EngineClosed):
        await unloading


async def test_requests_that_have_ended_are_not_remembered_as_stale(start: Start) -> None:
    shared = await start()
    for version in range(2, 5):
        asked = [replace(request(version, max_tokens=1000), job_id="a")]
        shared.engine.submit(asked)
        await eventually(lambda: shared.engine.stats().running)
        await shared.engine.load_adapter("a", version, None, keep_kv=True)
        assert shared.engine._stale_keys == {asked[0].key}
        shared.engine.abort([asked[0].key])
        await eventually(lambda: not shared.engine.stats().running)
