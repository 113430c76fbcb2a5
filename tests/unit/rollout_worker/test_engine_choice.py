"""Which engine is asked for reaches the worker, and one that is not installed is refused before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.local.processes import LaunchContext, LocalOptions, spec_of
from rlboost.services.rollout_worker.__main__ import _engines
from rlboost.services.rollout_worker.adapters.torch.factory import TorchFactory
from rlboost.services.rollout_worker.adapters.vllm import factory, plugin
from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions, argument_error
from rlboost.services.rollout_worker.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import EngineName
from rlboost.shared.settings import read

find_spec = importlib.util.find_spec


@pytest.fixture
def vllm_is_there(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (request.param or None) if name == "vllm" else find_spec(name)
    )


@pytest.mark.parametrize("vllm_is_there", [True], indirect=True)
@pytest.mark.usefixtures("vllm_is_there")
def test_the_setting_chooses_the_engine() -> None:
    assert isinstance(_engines(Settings(engine="torch")), TorchFactory)
    assert isinstance(_engines(Settings(engine="vllm")), VllmFactory)


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_the_setting_chooses_whether_the_torch_engine_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speculation: str
) -> None:
    pytest.importorskip("torch")
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    monkeypatch.setenv("RLBOOST_WORKER_SPECULATION", speculation)
    config = tiny_models.save_config(tiny_models.CONFIGS["qwen3-tied"], tmp_path) / "config.json"
    engine = _engines(read(Settings, ["--token=t"])).build(config.read_text())
    assert engine.stats().uses_drafts is (speculation == "auto")
    asyncio.run(engine.close())


def test_drafts_are_not_both_off_and_configured() -> None:
    with pytest.raises(ConfigError, match="speculation is off, and vllm_args has speculative decoding"):
        _engines(Settings(engine="vllm", speculation="off", vllm_args={"speculative_config": {"method": "ngram"}}))


@pytest.mark.parametrize("vllm_is_there", [False], indirect=True)
@pytest.mark.usefixtures("vllm_is_there")
def test_worker_without_vllm_names_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match="make install-vllm"):
        _engines(Settings(engine="vllm"))


def test_engine_arguments_are_read_as_json_and_refused_for_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_WORKER_VLLM_ARGS", '{"block_size": 32}')
    settings = read(Settings, ["--token=t"])
    assert settings.vllm_args == {"block_size": 32}
    with pytest.raises(ConfigError, match="vllm_args needs the vllm engine"):
        _engines(settings)


@pytest.mark.parametrize(
    ("engine", "given", "held"), [("torch", 0, 8), ("torch", 1, 0), ("vllm", 0, 0), ("vllm", 1, 0), ("vllm", 4, 4)]
)
def test_vllm_holds_several_adapters_only_if_told_to(engine: EngineName, given: int, held: int) -> None:
    assert Settings(engine=engine, max_adapters=given).held_adapters == held


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("logits_processors", ["a:B"], "logits_processors is refused: it changes the distribution"),
        ("logits_processors", None, ""),
        ("override_generation_config", {"top_k": 20}, "only the job file and clients may set"),
        ("watermark_config", {"a": 1}, "a watermark changes"),
        ("enable_lora", True, "RLBOOST_WORKER_MAX_ADAPTERS says how many adapters"),
        ("logprobs_mode", "raw_logprobs", ""),
        ("logprobs_mode", "processed_logits", "use processed_logprobs or raw_logprobs"),
        ("max_num_batched_tokens", 8192, ""),
        ("speculative_config", {"method": "ngram"}, ""),
        ("speculative_config", {"method": "ngram", "rejection_sample_method": "synthetic"}, "synthetic accepts drafts"),
        ("speculative_config", {"method": "mtp"}, "method 'mtp' drafts with weights of its own, which would be random"),
        ("speculative_config", {"model": "draft"}, "use ngram, ngram_gpu, suffix, custom_class"),
        ("speculative_config", {"model": "draft", "draft_load_config": {"load_format": "auto"}}, ""),
        ("spec_method", "eagle", "'eagle' drafts with weights of its own"),
        ("spec_method", "ngram", ""),
        ("spec_model", "draft", "would draft with random weights"),
        ("limit_mm_per_prompt", {"image": 2}, 'so only {"image": 0} is accepted'),
        ("limit_mm_per_prompt", {"image": 0}, ""),
        ("mm_processor_kwargs", {"size": 1}, "images are computed as the trainer prepares them"),
    ],
)
def test_vllm_argument_that_spoils_training_is_refused(name: str, value: object, why: str) -> None:
    error = argument_error(name, value)
    assert (why in error) if why else (error == "")


def test_error_of_a_failed_check_names_the_vllm_arguments_that_may_be_the_cause() -> None:
    given = VllmOptions(1, vllm_args={"speculative_config": {"method": "ngram"}, "block_size": 32}).suspects
    assert "RLBOOST_WORKER_VLLM_ARGS, which sets speculative_config (with which vllm 0.32 reports wrong" in given
    assert given.endswith(", block_size.")
    assert VllmOptions(1).suspects == ""


@pytest.mark.parametrize("vllm_is_there", [True], indirect=True)
@pytest.mark.usefixtures("vllm_is_there")
def test_installed_logits_processors_of_a_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(*, group: str) -> EntryPoints:
        value = "evil:Processor" if group == "vllm.logits_processors" else "ours"
        return EntryPoints([EntryPoint(plugin.NAME, value, group)])

    monkeypatch.setattr(factory, "entry_points", installed)
    with pytest.raises(ConfigError, match="apply the logits processors of evil:Processor"):
        VllmFactory(VllmOptions(1)).prepare()


def test_several_gpus_are_refused_for_the_torch_engine() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 2 needs the vllm engine"):
        _engines(Settings(engine="torch", tensor_parallel=2))


@pytest.mark.parametrize("vllm_is_there", [False], indirect=True)
@pytest.mark.parametrize("command", ["up", "demo"])
@pytest.mark.usefixtures("vllm_is_there")
def test_a_system_that_lacks_vllm_is_not_started(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [command, "--engine", "vllm", "--state", str(tmp_path / "state")])
    assert done.exit_code == 2
    assert "make install-vllm" in done.output
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("role", ["reserved", "preemptible"])
def test_the_launcher_passes_the_engine_to_every_worker(role: str, tmp_path: Path) -> None:
    context = LaunchContext(
        options=LocalOptions(state_dir=tmp_path, engine="vllm"),
        state_dir=tmp_path,
        cwd=tmp_path,
        inherited={},
        token="t",
        join_token="j",
        redis_url="redis://",
        redis_argv=(),
        port_of=lambda _: 1,
    )
    name = "reserved-1" if role == "reserved" else "worker-1"
    assert spec_of(context, name, role).env["RLBOOST_WORKER_ENGINE"] == "vllm"  # type: ignore[arg-type]
