"""Jobs that train LoRA adapters of one model at the same time, on two workers that serve all of them at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import peft
import pytest
import torch

from rlboost.fleet import Fleet
from tests.support import tiny_models, vllm_engines
from tests.support.published_model import policy as model
from tests.support.service_process import TOKEN
from tests.support.serving_system import TEMPLATE, WAIT_S, System, until

PROMPTS = [[5 + i, 7, 9, 11 + i] for i in range(6)]
N, MAX_TOKENS, STEPS = 4, 48, 3
_START_S = 300.0
"""vLLM takes long to start on a busy machine."""
LORA: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "target_modules": "all-linear"},
    "two": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "three": {"r": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "four": {"r": 8, "target_modules": ["o_proj", "up_proj"]},
}


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system that does not run yet."""
    system = System(tmp_path_factory.mktemp("shared"), TEMPLATE)
    yield system
    system.close()


@pytest.fixture
def system(bare: System) -> System:
    bare.start_services()
    return bare


def adapted(seed: int, base: Any = None, **config: Any) -> Any:
    torch.manual_seed(seed)
    lora = peft.LoraConfig(lora_alpha=16, init_lora_weights=False, **config)
    return peft.get_peft_model(base or model(0), lora)


def fleet_of(system: System, job: str) -> Fleet:
    return Fleet(system.manager.url, TOKEN, job=job, model=str(system.model), retry_for_s=WAIT_S)


def workers(system: System) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = system.http.get("/v1/workers").json()
    return [worker for worker in found if worker["state"] == "ready"]


def events(system: System, job_id: str, kind: str) -> list[dict[str, Any]]:
    text = system.http.get(f"/v1/jobs/{job_id}/events").text
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return [event for event in found if event["kind"] == kind]


def test_four_jobs_share_workers_without_a_switch_while_one_is_killed(system: System) -> None:
    policies = {job: adapted(seed, **lora) for seed, (job, lora) in enumerate(LORA.items())}
    train_together(system, policies, then=lambda: system.hire("w3"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_jobs_share_a_vllm_worker_and_resume_on_torch_when_it_is_killed(bare: System) -> None:
    vllm_engines.require_installed()
    config = vllm_engines.config()
    (bare.model / "config.json").write_text(config.to_json_string())
    bare.start_services(workers=())
    settings = {"MAX_ADAPTERS": "4", "MAX_ADAPTER_RANK": "16", "KV_CACHE_BYTES": str(8 << 20)}
    bare.hire("w1", ENGINE="vllm", **settings)
    policies = {job: adapted(seed, tiny_models.make(config), **lora) for seed, (job, lora) in enumerate(LORA.items())}
    train_together(bare, policies, then=lambda: bare.hire("w2"))


def train_together(system: System, policies: dict[str, Any], then: Callable[[], None]) -> None:
    """Train all jobs at the same time; kill a worker once one serves all of them, and call `then`.

    Each sample has the log-probabilities of its job's merged model, and all that were requested are delivered.
    """
    together = Barrier(len(policies))

    def train(job: str) -> tuple[str, set[str]]:
        """Publish an adapter and sample with it, `STEPS` times; return the job's id and the workers it had."""
        policy, used = policies[job], set()
        with fleet_of(system, job) as fleet:
            version = fleet.publish(policy)
            for _ in range(STEPS):
                together.wait(_START_S)
                merged = copy.deepcopy(policy).merge_and_unload()
                groups = list(fleet.generate(PROMPTS, n=N, max_tokens=MAX_TOKENS))
                assert not any(group.dropped for group in groups)
                for group in groups:
                    for sample in group.samples:
                        assert {span[1] for span in sample.spans} == {version}
                        used |= {span[0] for span in sample.spans}
                        expected = tiny_models.logprobs(merged, PROMPTS[group.index], sample.tokens)
                        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
                with torch.no_grad():
                    for name, tensor in policy.named_parameters():
                        if "lora_B" in name:
                            tensor.mul_(-1.1)
                version = fleet.publish(policy)
                fleet.complete_step()
            fleet.end()
            return fleet.job_id, used

    with ThreadPoolExecutor(len(LORA)) as pool:
        training = [pool.submit(train, job) for job in LORA]
        until(lambda: any(len(worker["alongside"]) == len(LORA) - 1 for worker in workers(system)), _START_S)
        system.kill_the_worker_that_runs()
        then()
        results = [one.result() for one in training]
    for job_id, _ in results:
        audit = system.http.get(f"/v1/jobs/{job_id}/audit").json()
        assert audit["requested"] == audit["delivered"] == STEPS * len(PROMPTS) * N
        assert audit["duplicates"] == 0
        assert not audit["dropped"]
        until(lambda job_id=job_id: system.http.get(f"/v1/jobs/{job_id}").json()["state"] == "completed")
        # A worker that served no job before is no switch.
        assert not [event for event in events(system, job_id, "worker_reassigned") if event["fields"]["before"]]
        assert events(system, job_id, "adapter_not_shared") == []
    assert set.intersection(*(used for _, used in results)), "no worker generated for all of them"


def test_adapter_above_the_maximum_rank_is_served_by_switching(system: System) -> None:
    small = adapted(0, r=2, target_modules=["q_proj"])
    with fleet_of(system, "small") as one, fleet_of(system, "large") as other:
        one.publish(small)
        other.publish(adapted(1, r=80, target_modules=["q_proj"]))
        merged = adapted(1, r=80, target_modules=["q_proj"]).merge_and_unload()
        assert not any(group.dropped for group in one.generate(PROMPTS, n=N, max_tokens=8))
        for group in other.generate(PROMPTS, n=N, max_tokens=8):
            for sample in group.samples:
                expected = tiny_models.logprobs(merged, PROMPTS[group.index], sample.tokens)
                assert sample.logprobs == pytest.approx(expected, abs=1e-4)
        other.end()
        until(lambda: system.http.get(f"/v1/jobs/{other.job_id}").json()["state"] == "completed")
        reasons = {event["fields"]["reason"] for event in events(system, other.job_id, "adapter_not_shared")}
        assert reasons == {"its adapter must be merged: its rank 80 is above RLBOOST_WORKER_MAX_ADAPTER_RANK, 64"}
