"""What vLLM is started with, and what is refused before it starts. Real vLLM on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlboost.services.rollout_worker.adapters.vllm.options import REFUSED_ARGUMENTS, SUSPECT_ARGUMENTS, VllmOptions
from rlboost.services.rollout_worker.ports import EngineFailed
from rlboost.shared.errors import ConfigError, UnsuitableWeights
from tests.support import vllm_engines

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM leaves its own open
]


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({"num_attention_heads": 3}, {}, "vllm cannot run this model"),
        ({"model_type": "nonsense", "architectures": None}, {}, "no causal language model of model_type"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {}, "weights are quantized"),
        ({}, {"device": "cuda"}, "installed vllm runs on cpu"),
        ({}, {"kv_cache_bytes": 1024}, "vllm cannot run this model"),
        ({}, {"dtype": "bfloat16", "vllm_args": {"quantization": "mxfp8"}}, "VLLM_ARGS, which sets quantization"),
        (
            {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": 1},
            {},
            "vllm cannot run this model",
        ),
    ],
)
def test_unsupported_model_or_device_is_refused_at_build(
    changes: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    vllm_engines.require()
    config = vllm_engines.config()
    with pytest.raises(ConfigError if "device" in settings else UnsuitableWeights, match=why):
        vllm_engines.build({**config.to_dict(), **changes}, slots=2, **settings)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of vLLM that is not there yet."""
    vllm_engines.require()
    from vllm import envs  # noqa: PLC0415 - see require

    monkeypatch.setitem(vars(envs), "VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_model_folder_is_stable_for_vllms_compilation_cache(cache: Path) -> None:
    from rlboost.services.rollout_worker.adapters.vllm.arguments import model_folder  # noqa: PLC0415 - it imports vllm

    one = model_folder({"model_type": "qwen3", "hidden_size": 8})
    assert one == model_folder({"hidden_size": 8, "model_type": "qwen3"})
    assert one != model_folder({"hidden_size": 16, "model_type": "qwen3"})
    assert cache in one.parents
    (file,) = one.iterdir()
    read = json.loads(file.read_text())
    assert read == {"model_type": "qwen3", "hidden_size": 8, "architectures": ["Qwen3ForCausalLM"]}
    assert file.stat().st_mode & 0o777 == 0o644, "a worker of another user reads it, too"


def test_family_that_vllm_workers_do_not_show_images_to_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlboost.services.rollout_worker.adapters.vllm import arguments, plugin  # noqa: PLC0415 - it imports vllm

    folder = arguments.model_folder({"model_type": "qwen3_vl"})
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["RLBoostQwen3VL"]
    monkeypatch.setattr(plugin, "VISION_MODELS", {"other_vl": "Other"})
    with pytest.raises(UnsuitableWeights, match="vllm workers support other_vl and not qwen3_vl: use torch workers"):
        arguments.model_folder({"model_type": "qwen3_vl"})


def test_unwritable_vllm_cache_names_its_setting(cache: Path) -> None:
    from rlboost.services.rollout_worker.adapters.vllm.arguments import model_folder  # noqa: PLC0415 - it imports vllm

    cache.write_text("a file")
    with pytest.raises(ConfigError, match="set VLLM_CACHE_ROOT to one that can"):
        model_folder({"model_type": "qwen3"})


def test_engine_arguments_reach_vllm_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    vllm_engines.require()
    from rlboost.services.rollout_worker.adapters.vllm import arguments  # noqa: PLC0415 - needs vllm

    (tmp_path / "config.json").write_text("{}")
    more = {"max_num_batched_tokens": 8192, "logprobs_mode": "raw_logprobs"}
    given = arguments.engine_args(tmp_path, VllmOptions(8, gpu_memory_utilization=0.4, vllm_args=more))
    assert (given.gpu_memory_utilization, given.max_num_batched_tokens, given.max_num_seqs) == (0.4, 8192, 8)
    assert given.logprobs_mode == "raw_logprobs"
    default = arguments.engine_args(tmp_path, VllmOptions(8))
    assert (default.gpu_memory_utilization, default.logprobs_mode) == (0.92, "processed_logprobs")
    assert default.generation_config == "vllm", "no top-k of a model's generation_config.json"
    arguments.check_arguments(more)
    with pytest.raises(
        ConfigError, match=r"has no engine argument 'max_num_batch_tokens': did you mean max_num_batched_"
    ):
        arguments.check_arguments({"max_num_batch_tokens": 1})
    with pytest.raises(ConfigError, match="load_format is not free"):
        arguments.check_arguments({"load_format": "auto"})
    online = {"quantization_config": {"linear": "fp8_per_channel"}}
    arguments.check_arguments({**online, "quantization": "online"})
    with pytest.raises(ConfigError, match='ignores quantization_config without quantization: add "quantization"'):
        arguments.check_arguments(online)
    with pytest.raises(ConfigError, match="logits_processors is refused: it changes the distribution"):
        arguments.check_arguments({"logits_processors": ["a:B"]})


def test_every_argument_in_the_tables_exists_in_vllm() -> None:
    vllm_engines.require()
    from vllm import AsyncEngineArgs  # noqa: PLC0415 - needs vllm

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert {*REFUSED_ARGUMENTS, *SUSPECT_ARGUMENTS} <= known


def test_vllm_holds_adapters_of_models_that_support_them_if_it_is_to() -> None:
    vllm_engines.require()
    from rlboost.services.rollout_worker.adapters.vllm.arguments import engine_args, model_folder  # noqa: PLC0415
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    def enabled(config: Any, **options: Any) -> bool:
        return bool(engine_args(model_folder(config.to_dict()), VllmOptions(1, **options)).enable_lora)

    assert enabled(vllm_engines.config(), max_adapters=2)
    assert not enabled(vllm_engines.config())
    assert not enabled(tiny_models.CONFIGS["qwen3-moe"], max_adapters=2)
    assert not enabled(tiny_models.CONFIGS["gpt2"], max_adapters=2)
    with pytest.raises(ConfigError, match=r"RLBOOST_WORKER_MAX_ADAPTER_RANK is 600, and vllm holds .* rank 512: lower"):
        enabled(vllm_engines.config(), max_adapters=2, max_adapter_rank=600)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"lora_modules": ["a=/a"]}, "lora_modules is not one of"),
        ({"tool_parser_plugin": "/plugin.py"}, "tool_parser_plugin is not one of"),
        ({"enable_auto_tool_choice": "false"}, "enable_auto_tool_choice is 'false': give a bool, such as False"),
        ({"api_key": ["k"]}, "keys are in VLLM_API_KEY"),
        ({"nonsense": 1}, "nonsense is not one of .*: remove it"),
        ({"tool_call_parse": "hermes"}, "did you mean tool_call_parser"),
    ],
)
async def test_front_arguments_that_have_another_place_are_refused(arguments: dict[str, Any], why: str) -> None:
    vllm_engines.require()
    vllm_engines.require_installed("watchfiles")
    from rlboost.services.rollout_worker.adapters.vllm.front import Front  # noqa: PLC0415 - it imports vllm

    with pytest.raises(ConfigError, match=why):
        await Front(Mock(), VllmOptions(1, served_model="/m")).app(arguments)


def test_front_arguments_are_those_of_vllm() -> None:
    vllm_engines.require()
    vllm_engines.require_installed("watchfiles")
    from rlboost.services.rollout_worker.adapters.vllm import front  # noqa: PLC0415 - as above

    defaults = front._namespace({})
    assert [name for name in front._ARGUMENTS if not hasattr(defaults, name)] == []


async def test_front_times_first_tokens_of_answers_that_are_sent_whole() -> None:
    """A long answer without a stream is not late, and the client gets what vLLM gives for it: all choices at once."""
    vllm_engines.require()
    vllm_engines.require_installed("watchfiles")
    from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415 - as above
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - as above

    from rlboost.services.rollout_worker.adapters.vllm.front import Front  # noqa: PLC0415 - as above

    parts = [(1, "x", False), (0, "a", False), (0, "ab", False), (1, "xy", True)]
    waits: list[float] = []

    class Llm:
        async def generate(self, _: str, params: SamplingParams, __: str) -> AsyncIterator[RequestOutput]:
            assert params.output_kind == RequestOutputKind.CUMULATIVE
            for index, text, finished in parts:
                choice = CompletionOutput(index, text, [1], None, None)
                yield RequestOutput("r", None, [1], None, [choice], finished)
                waits.append(requests.longest_wait_s())

    requests = Front(Llm(), VllmOptions(1, served_model="/m")).requests
    given = SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    (answer,) = [output async for output in requests.generate("prompt", given, "r")]
    assert [choice.text for choice in answer.outputs] == ["ab", "xy"]
    assert (given.output_kind, waits, requests.n_running) == (RequestOutputKind.FINAL_ONLY, [0.0] * 4, 0)
    assert (len(requests.take_first_tokens_s()), requests.take_first_tokens_s()) == (1, [])


async def test_front_whose_vllm_died_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_engines.require()
    vllm_engines.require_installed("watchfiles")
    from rlboost.services.rollout_worker.adapters.vllm import front  # noqa: PLC0415 - as above

    monkeypatch.setattr(front, "_LIVENESS_S", 0.001)
    with pytest.raises(EngineFailed, match="no memory"):
        await front.Front(Mock(errored=True, dead_error=OSError("no memory")), VllmOptions(1)).watch(asyncio.Event())


def test_engine_that_serves_is_scheduled_by_priority() -> None:
    vllm_engines.require()
    vllm_engines.require_installed("watchfiles")
    from rlboost.services.rollout_worker.adapters.vllm.front import start  # noqa: PLC0415 - as above

    with pytest.raises(ConfigError, match="remove scheduling_policy"):
        start(VllmOptions(1, served_model="/m", vllm_args={"scheduling_policy": "fcfs"}))
