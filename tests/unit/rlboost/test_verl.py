"""What verl gets of a fleet, and is refused, with stubs that have verl's recorded interface."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlboost.fleet import Group, Sample
from rlboost.shared.errors import ConfigError, Fatal
from tests.support.verl_interface import with_stubs

OPTIONS = {"job": "sums"}


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    return with_stubs()


def rollout(verl: ModuleType, **changed: Any) -> Any:
    given = {"options": OPTIONS, "model": "m", "config": {"tie_word_embeddings": True}, "eos_token_ids": (2,)}
    limits = {"dtype": "float32", "prompt_length": 16, "response_length": 8, "max_model_len": 30}
    return verl.Rollout(**{**given, **limits, **changed})


def verl_config(**changed: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "engine_kwargs": {"rlboost": {**OPTIONS, "max_staleness": 1}},
        "tensor_model_parallel_size": 1,
        "checkpoint_engine": SimpleNamespace(backend="naive"),
        "prometheus": SimpleNamespace(enable=False),
        "disaggregation": SimpleNamespace(enabled=False),
        "dtype": "bfloat16",
        "max_model_len": None,
        "prompt_length": 16,
        "response_length": 8,
    }
    flags = dict.fromkeys(("quantization", "enable_rollout_routing_replay", "full_determinism", "ignore_eos", "qat"))
    return SimpleNamespace(**{**given, **flags, **changed})


class HfConfig(SimpleNamespace):
    def to_json_string(self, **_: Any) -> str:
        return '{"model_type": "qwen3", "dtype": "float32", "attn_implementation": "flash_attention_2"}'


MODEL = SimpleNamespace(
    path="m",
    hf_config=HfConfig(max_position_embeddings=512),
    tokenizer=SimpleNamespace(eos_token_id=2),
    generation_config=SimpleNamespace(eos_token_id=[2, 5]),
)


class FakeFleet:
    """A fleet whose samples lie across the two newest versions."""

    def __init__(self, dropped: list[str] | None = None) -> None:
        self.version, self.dropped = -1, dropped or []
        self.asked: list[dict[str, Any]] = []
        self.published: list[Any] = []
        self.released: list[int] = []
        self.is_changed = True
        self.resumed = asyncio.Event()
        self.resumed.set()

    async def publish(self, tensors: Any, **_: Any) -> int:
        self.published.append(tensors)
        self.version += self.is_changed
        return self.version

    async def checkpointed(self, *, step: int) -> None:
        self.released.append(step)

    async def generate(self, prompts: Any, **options: Any) -> AsyncIterator[Group]:
        self.asked.append({"prompts": prompts, **options})
        await self.resumed.wait()
        older = options["step"] - options["max_staleness"]
        sample = Sample([7, 2], [-0.5, -0.1], "stop", [("a", older, 1), ("b", options["step"], 1)], 2)
        yield Group(0, [] if self.dropped else [sample], self.dropped)


def actor(verl: ModuleType, fleet: FakeFleet, **changed: Any) -> Any:
    made = verl.FleetActor(rollout(verl, **changed))
    made._fleet = fleet
    return made


async def part(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...], Any]:
    async def stored() -> np.ndarray[Any, Any]:
        return tensor.contiguous().view(-1).view(torch.uint8).numpy()

    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), stored()


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        ("FleetCheckpointEngine", "CheckpointEngine"),
        ("FleetRollout", "BaseRollout"),
        ("FleetReplica", "RolloutReplica"),
    ],
)
def test_verls_methods_are_implemented_with_its_parameters(verl: ModuleType, ours: str, base: str) -> None:
    kind = getattr(verl, ours)
    overridden = {name: names for name, names in kind.methods.items() if name in vars(kind) and name != "__init__"}
    assert overridden, base
    for name, names in overridden.items():
        has = inspect.signature(getattr(kind, name)).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in has.values())
        assert set(names) - {"kwargs"} <= set(has) or takes_all, name
    missing = set(kind.methods) - set(vars(kind)) - {"__init__"}
    assert missing == set(), missing


def test_what_verl_looks_up_is_registered(verl: ModuleType) -> None:
    assert verl.RolloutReplicaRegistry.found["rlboost"]() is verl.FleetReplica
    assert verl.CheckpointEngineRegistry.found["rlboost"] is verl.FleetCheckpointEngine
    assert verl._ROLLOUT_REGISTRY == {("rlboost", "async"): "rlboost.verl.FleetRollout"}


def test_sampling_is_that_of_verls_own_servers(verl: ModuleType) -> None:
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    own = verl.sampling_of(params, 10, rollout(verl))
    assert own == {"max_tokens": 8, "top_k": 0, "stop_token_ids": [2], "temperature": 0.7, "top_p": 0.9}
    assert verl.sampling_of({}, 20, rollout(verl))["max_tokens"] == 4  # of 16 + 8
    assert verl.sampling_of({"max_new_tokens": 50}, 10, rollout(verl))["max_tokens"] == 20  # of max_model_len
    given = verl.sampling_of({"ignore_eos": True, "stop_token_ids": [9], "top_k": 5}, 1, rollout(verl))
    assert (given["stop_token_ids"], given["top_k"]) == ([9], 5)
    # verl's agent loops leave this one to the rollout's configuration.
    assert verl.sampling_of({}, 1, rollout(verl, ignore_eos=True))["stop_token_ids"] == []
    assert verl.sampling_of({"ignore_eos": False}, 1, rollout(verl, ignore_eos=True))["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("params", "n_prompt", "why"),
    [
        ({"repetition_penalty": 1.1}, 4, r"repetition_penalty: 1\.1 is not supported"),
        ({"prompt_logprobs": 0}, 4, "prompt_logprobs: 0 is not supported"),
        ({}, 30, "a prompt of 30 tokens leaves no room in 30"),
    ],
    ids=["penalty", "prompt_logprobs", "long prompt"],
)
def test_requests_that_a_fleet_cannot_serve_are_rejected_by_name(
    verl: ModuleType, params: dict[str, Any], n_prompt: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        verl.sampling_of(params, n_prompt, rollout(verl))


@pytest.mark.parametrize(
    ("changed", "policy", "why"),
    [
        ({"engine_kwargs": {}}, True, r"engine_kwargs\.rlboost\.job: give the name"),
        ({"engine_kwargs": {"rlboost": {**OPTIONS, "max_staleness": -1}}}, True, r"max_staleness: give a number"),
        ({"tensor_model_parallel_size": 2}, True, "tensor_model_parallel_size: give 1"),
        ({"checkpoint_engine": SimpleNamespace(backend="nccl")}, True, r"checkpoint_engine\.backend: give rlboost"),
        ({"quantization": "fp8"}, True, "quantization: workers have the dtype"),
        ({"qat": {"enable": True}}, True, "qat: workers have the weights"),
        ({"full_determinism": True}, True, "full_determinism: turn it off"),
        ({}, False, r"reward_model\.rollout\.name: give reward and teacher models another rollout"),
    ],
    ids=["job", "staleness", "tensor parallel", "nccl", "fp8", "qat", "determinism", "reward model"],
)
def test_settings_that_a_fleet_does_not_have_are_rejected_by_name(
    verl: ModuleType, changed: dict[str, Any], policy: bool, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        verl.rollout_of(verl_config(**changed), MODEL, serves_policy=policy)


def test_rollout_has_the_models_configuration_and_ends(verl: ModuleType) -> None:
    made = verl.rollout_of(verl_config(ignore_eos=True), MODEL)
    assert made.ignore_eos
    assert made.config == {"model_type": "qwen3", "dtype": "bfloat16"}
    assert (made.eos_token_ids, made.max_model_len, made.max_staleness) == ((2, 5), 512, 1)
    assert made.options == OPTIONS


async def test_samples_are_labeled_with_verls_steps(verl: ModuleType) -> None:
    fleet = FakeFleet()
    made = actor(verl, fleet, max_staleness=1)
    weights = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    await made.publish([await part("w", weights)], 40)
    assert torch.equal(fleet.published[0]["w"], weights)
    first = await made.generate([1, 5], {"logprobs": True}, "a")
    # Version -1 is of no step of this run, so the first version's samples are of it alone.
    assert fleet.asked[0]["max_staleness"] == 0
    assert first.extra_fields == {"global_steps": 40, "min_global_steps": 40, "max_global_steps": 40}
    assert (first.token_ids, first.log_probs, first.stop_reason, first.num_preempted) == (
        *([7, 2], [-0.5, -0.1]),
        *("completed", 1),
    )
    await made.publish([await part("w", weights)], 44)
    second = await made.generate([1, 5], {"logprobs": False}, "b")
    assert second.log_probs is None
    assert second.extra_fields == {"global_steps": 40, "min_global_steps": 40, "max_global_steps": 44}


async def test_weights_that_are_sent_again_without_a_step_keep_theirs(verl: ModuleType) -> None:
    """verl does so in a validation whose reward model shares the GPUs."""
    fleet = FakeFleet()
    made = actor(verl, fleet)
    await made.publish([], 40)
    fleet.is_changed = False
    await made.publish([], None)
    assert (await made.generate([1], {}, "a")).extra_fields["global_steps"] == 40


async def test_samples_are_released_when_their_step_has_none_in_flight(verl: ModuleType) -> None:
    fleet = FakeFleet()
    made = actor(verl, fleet)
    for step in (0, 1):
        await made.publish([], step)
    assert fleet.released == [0]
    fleet.resumed.clear()
    slow = asyncio.create_task(made.generate([1], {}, "slow"))  # of version 1
    await asyncio.sleep(0)
    await made.publish([], 2)
    assert fleet.released == [0]
    fleet.resumed.set()
    await slow
    await made.publish([], 3)
    assert fleet.released == [0, 2]


async def test_dropped_samples_and_images_are_errors(verl: ModuleType) -> None:
    made = actor(verl, FakeFleet(["no worker can load it"]))
    await made.publish([], 0)
    with pytest.raises(Fatal, match="dropped a sample: no worker can load it"):
        await made.generate([1], {}, "a")
    with pytest.raises(ConfigError, match="token ids only"):
        await made.generate([1], {}, "a", image_data=[object()])


async def test_rank_0_sends_whole_tensors_and_others_gather_them(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def published_as() -> tuple[str, bool]:
        return "bfloat16", True

    async def publish(parts: Any, step: int) -> None:
        sent.append((parts, step))

    handle = SimpleNamespace(published_as=SimpleNamespace(remote=published_as), publish=SimpleNamespace(remote=publish))
    monkeypatch.setattr(verl, "ray", SimpleNamespace(get_actor=lambda _: handle, put=lambda data: data))
    weights = [("w", torch.ones(2, 3)), ("lm_head.weight", torch.ones(4)), ("n", torch.arange(2))]
    gathered = iter(weights)
    await verl.FleetCheckpointEngine(bucket_size=1).send_weights(gathered, global_steps=3)
    assert (list(gathered), sent) == ([], [])
    await verl.FleetCheckpointEngine(bucket_size=1, is_master=True).send_weights(iter(weights), global_steps=3)
    ((parts, step),) = sent
    assert step == 3
    assert [(name, dtype, shape, data.nbytes) for name, dtype, shape, data in parts] == [
        ("w", "bfloat16", (2, 3), 12),  # in the rollout's dtype; the output layer is the embedding
        ("n", "int64", (2,), 16),
    ]
    with pytest.raises(ConfigError, match=r"lora\.merge=true"):
        await verl.send([("q.base_layer.weight", torch.ones(1))], 0, is_sender=False)
