"""LoRA adapters of tiny models: as versions that a worker has pulled, merged, and several in one engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.shared.weights.cache import AdaptedVersion, PulledVersion
from tests.support import tiny_models
from tests.support.engines import Collected, Collector, request
from tests.support.eventually import eventually
from tests.support.staged_versions import pulled
from tests.support.staged_weights import shard

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def pulled_base(model: Any, directory: Path) -> PulledVersion:
    """Return the model as version 0."""
    return pulled((shard(*item) for item in tiny_models.weights(model)), directory)


def adapter_tensors(
    model: Any, targets: Sequence[str] = (*ATTENTION, *MLP), *, rank: int = 4, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter that changes log-probabilities by much, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in tiny_models.weights(model):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            found[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            found[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.02
    return found


def staged_adapter(
    base: PulledVersion, tensors: dict[str, torch.Tensor], directory: Path, *, version: int = 1, alpha: float = 8.0
) -> AdaptedVersion:
    """Return an adapter version as a worker has pulled it."""
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name)
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha})
    version_ = pulled((shard(*item) for item in tensors.items()), directory, version, base=base, adapter_json=config)
    return AdaptedVersion(version_, base)


def merged(model: Any, staged: AdaptedVersion) -> Any:
    """Return a copy of the model with the adapter merged into its weights."""
    changed = copy.deepcopy(model)
    changed.load_state_dict(dict(staged.tensors()), strict=False)
    return changed


JOBS: dict[str, dict[str, Any]] = {
    "a": {"seed": 1},
    "b": {"seed": 2, "rank": 1},
    "c": {"seed": 3, "rank": 16, "targets": ATTENTION},
    "d": {"seed": 4, "rank": 3, "targets": (*MLP, "q_proj")},
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 + i] for i in range(3)]


class Shared:
    """One engine with the adapters of `JOBS`, and the model of each job, merged."""

    def __init__(self, model: Any, engine: Any, directory: Path) -> None:
        self.model, self.engine, self.directory = model, engine, directory
        self.base = pulled_base(model, directory)
        self.models = {"": model}

    async def load(self, job: str, version: int = 1, *, keep_kv: bool = False, **adapter: Any) -> None:
        """Load an adapter of a job, made as `adapter` says."""
        tensors = adapter_tensors(self.model, **adapter)
        staged = staged_adapter(self.base, tensors, self.directory, version=version)
        assert self.engine.adapter_refusal(staged) == ""
        assert await self.engine.load_adapter(job, version, staged, keep_kv=keep_kv) == []
        self.models[job] = merged(self.model, staged)

    def assert_logprobs(self, asked: Request, made: Collected, job: str | None = None) -> None:
        model = self.models[asked.job_id if job is None else job]
        expected = tiny_models.logprobs(model, asked.prompt, made.tokens, asked.sampling.temperature)
        assert made.logprobs == pytest.approx(expected, abs=1e-4)

    async def assert_new_adapter_changes_no_row_of_another(self, n: int) -> None:
        """Load a new adapter of job b while the requests of all are generated."""
        before = self.models["b"]
        asked = [replace(one, sampling=request(0, max_tokens=90).sampling) for one in requests(n)]
        collector = Collector(self.engine)
        self.engine.submit(asked)
        await eventually(lambda: self.engine.stats().tokens_generated_total > 5 * n)
        await self.load("b", version=2, seed=9, rank=2)
        for one, made in zip(asked, await collector.all_ended(asked), strict=True):
            if one.job_id != "b":
                self.assert_logprobs(one, made)
                continue
            n_old = made.versions.count(1)
            assert made.versions == [1] * n_old + [2] * (len(made.tokens) - n_old)
            assert 0 < n_old < len(made.tokens)
            for model, part in ((before, slice(n_old)), (self.models["b"], slice(n_old, None))):
                expected = tiny_models.logprobs(model, one.prompt, made.tokens, one.sampling.temperature)
                assert made.logprobs[part] == pytest.approx(expected[part], abs=1e-4)


def requests(n: int, **sampling: Any) -> list[Request]:
    """Return requests of all jobs and of none, with prompts in common and different lengths."""
    jobs = ["", *JOBS]
    return [
        replace(request(i, prompt=PROMPTS[i % 3], max_tokens=5 + (i * 37) % 60, **sampling), job_id=jobs[i % 5])
        for i in range(n)
    ]
