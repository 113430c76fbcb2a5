"""`rlboost export` against a real weight store: the folder is the trained model, for transformers, PEFT and vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from rlboost import client, export
from rlboost.cli import app
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.weights import StorePublisher
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.wire import F32, I32, pack, unpack
from rlboost.verify import check
from tests.support.fake_rest import FakeRest, job, ok, problem
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model, write_tokenizer
from tests.support.recorded_run import KEY, SPEC, RecordedRun
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.training_rows import rows

PROMPT = torch.tensor([[1, 5, 20, 33, 7]])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, redis_server: Any) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("store")
    env = {"RLBOOST_WEIGHT_STORE_DIR": str(folder / "store"), "RLBOOST_WEIGHT_STORE_KEEP_VERSIONS": "2"}
    process = ServiceProcess("weight_store", "RLBOOST_WEIGHT_STORE_", folder, redis_server.url, env)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("base"), "llama-untied"))


class System:
    """What the command line sees of a system: the manager's answers are scripted, the weight store is real."""

    def __init__(self, folder: Path, store: ServiceProcess, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rest = FakeRest()
        self.out = folder / "out"
        self.job = f"job-{folder.name}"
        self._store, self._base, self._folder = store, base, folder
        monkeypatch.chdir(folder)
        monkeypatch.setattr(client, "Client", partial(client.Client, transport=self.rest))
        monkeypatch.setenv("RLBOOST_URL", "http://api.test")
        monkeypatch.setenv("RLBOOST_TOKEN", TOKEN)
        self.rest.on("GET /v1/weights", ok({"store_url": store.url}))
        self.is_job(model=str(base))

    def is_job(self, model: str) -> None:
        self.rest.on(f"GET /v1/jobs/{self.job}", ok(job("running", id=self.job)))
        self.rest.on(f"GET /v1/jobs/{self.job}/spec", ok({"model": model}))

    def trained(self, versions: int, lora: LoraSpec | None = None) -> list[TorchPolicy]:
        """Publish versions of a job, an optimizer step apart; return the models as they were."""

        async def publish() -> None:
            config_json = (self._base / "config.json").read_text()
            async with StoreClient(self._store.url, TOKEN) as open_client:
                publisher = StorePublisher(open_client, self.job, config_json, self._folder / "p", Waits(), 60.0)
                for version, engine in enumerate(engines):
                    what: Literal["base", "adapter"]
                    extra: dict[str, Any]
                    what, extra = ("base", {}) if lora is None or version == 0 else ("adapter", {"base_version": 0})
                    if extra:
                        extra["adapter_json"] = engine.adapter_json
                    await publisher.publish(version, engine.export_shards(what), expect=version - 1, **extra)
                await publisher.close()

        engines = []
        for version in range(versions):
            engine = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(lr=1e-2), lora=lora), device="cpu")
            engine.load_hf(self._base)
            for _ in range(version):
                engine.accumulate([rows()], clipped_loss(0.2, 0.28))
                engine.step(1e-2)
            engines.append(engine)
        asyncio.run(publish())
        return engines

    def export(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["export", self.job, "--out", str(self.out), *arguments])


@pytest.fixture
def system(tmp_path: Path, store: ServiceProcess, base: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, store, base, monkeypatch)


def logprobs(model: Any) -> torch.Tensor:
    """Return the log-probabilities of all tokens but the first of `PROMPT`, under a model of transformers."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=PROMPT).logits[0, :-1]
    return torch.log_softmax(found, -1).gather(1, PROMPT[0, 1:, None])[:, 0]


def trained_logprobs(engine: TorchPolicy) -> torch.Tensor:
    """Return the same under the trainer's."""
    first, *others = PROMPT[0].tolist()
    (column,) = engine.logprobs([[SequenceRow(pack([first], I32), pack(others, I32))]])
    return torch.from_numpy(unpack(column, F32).copy())


def assert_equal(model: Any, engine: TorchPolicy) -> None:
    torch.testing.assert_close(logprobs(model), trained_logprobs(engine), rtol=0.0, atol=1e-5)


def test_export_of_a_stored_version_has_the_trainers_probabilities(system: System) -> None:
    engines = system.trained(3)
    for version, arguments in ((1, ["--version", "1"]), (2, ["--force"])):
        done = system.export(*arguments, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == {"job": system.job, "version": version, "path": str(system.out)}
        model: Any = AutoModelForCausalLM.from_pretrained(system.out)
        assert_equal(model, engines[version])
    tokenizer: Any = AutoTokenizer.from_pretrained(system.out)
    assert tokenizer("t5")["input_ids"] == [1, 5]
    assert (trained_logprobs(engines[1]) - trained_logprobs(engines[2])).abs().max() > 1e-3
    assert sorted(path.name for path in system.out.parent.iterdir() if path.name.startswith(".")) == []


def test_export_of_a_missing_version_lists_available_ones(system: System) -> None:
    system.trained(4)
    done = system.export("--version", "0")
    assert done.exit_code == 2
    assert done.stderr == f"rlboost: version 0 of {system.job} is not retained; available: 2, 3\n"
    assert not system.out.exists()


def test_an_adapter_is_merged_or_comes_alone(system: System, base: Path) -> None:
    engines = system.trained(2, LoraSpec(rank=2))
    assert system.export().exit_code == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(system.out)
    assert_equal(merged, engines[1])
    system.out = system.out.with_name("adapter")
    assert system.export("--adapter").exit_code == 0
    assert sorted(path.name for path in system.out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), system.out)
    assert_equal(adapted, engines[1])
    refused = system.export("--adapter", "--version", "0", "--force")
    assert refused.stderr == f"rlboost: version 0 of {system.job} is not an adapter: omit --adapter\n"


def test_a_large_model_is_cut_into_files_that_transformers_finds(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    [engine] = system.trained(1)
    monkeypatch.setattr(export, "_FILE_BYTES", 20_000)
    assert system.export().exit_code == 0
    assert len(list(system.out.glob("model-0000*-of-0000*.safetensors"))) > 2
    model: Any = AutoModelForCausalLM.from_pretrained(system.out)
    assert_equal(model, engine)


# --- what is not there ------------------------------------------------------------------------------------------------


def test_export_of_a_finished_run_needs_no_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLBOOST_URL", raising=False)
    for name in ("model", "adapter"):
        folder = tmp_path / ".rlboost/runs/sums-1" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(name)
        (folder / "notes").mkdir()
    run = CliRunner().invoke
    done = run(app, ["export", "sums-1", "--out", "a"])
    assert done.stdout == ".rlboost/runs/sums-1/model is in a\n"
    assert run(app, ["export", "sums-1", "--out", "b", "--adapter"]).exit_code == 0
    assert [(tmp_path / out / "config.json").read_text() for out in "ab"] == ["model", "adapter"]
    other = run(app, ["export", "sums-2", "--out", "c"])
    assert other.exit_code == 2
    assert "does not run: start one with 'rlboost up'" in other.stderr
    assert not (tmp_path / "c").exists()


def test_model_card_names_the_certificate_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLBOOST_URL", raising=False)
    spec = {**SPEC, "model": "Qwen/Qwen3-0.6B", "kind": "rl", "steps": 3}
    run = tmp_path / ".rlboost/runs/sums-1"
    RecordedRun(run, tmp_path, spec=spec).train((0, 1, 2))
    done = CliRunner().invoke(app, ["export", "sums-1", "--out", "a"])
    assert done.exit_code == 0, done.stderr
    card = (tmp_path / "a/README.md").read_text()
    assert f"| certificate | `{check(run).head}` |" in card
    assert f"| signed with | `{KEY.public}` |" in card
    assert 'base_model: "Qwen/Qwen3-0.6B"\n' in card
    (run / "model/model.safetensors").write_bytes(b"others")
    done = CliRunner().invoke(app, ["export", "sums-1", "--out", "b"])
    assert "model/model.safetensors: it is not the file that was written" in done.stderr
    assert "certificate" not in (tmp_path / "b/README.md").read_text()


def test_a_folder_that_is_not_empty_stays_as_it_is(system: System) -> None:
    system.out.mkdir()
    (system.out / "notes.txt").write_text("mine")
    done = system.export()
    assert done.exit_code == 2
    assert done.stderr == f"rlboost: {system.out} exists and is not empty: choose another with --out, or pass --force\n"
    assert [path.name for path in system.out.iterdir()] == ["notes.txt"]
    assert system.rest.requests == []


def test_forced_export_replaces_weights_and_keeps_other_files(system: System) -> None:
    system.trained(1)
    system.out.mkdir()
    for name in ("notes.txt", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (system.out / name).write_text("old")
    assert system.export("--force").exit_code == 0
    names = {path.name for path in system.out.iterdir()}
    assert {"notes.txt", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}


def test_export_of_an_unknown_job_or_without_weights_is_an_error(system: System) -> None:
    assert system.export().stderr == (
        f"rlboost: {system.job} has no weights in the store: the first comes when it starts, see 'rlboost status'\n"
    )
    system.rest.on(f"GET /v1/jobs/{system.job}", problem(404, "No such job", "there is no job"))
    system.rest.on("GET /v1/jobs", ok([]))
    unknown = system.export()
    assert (unknown.exit_code, unknown.stderr) == (1, "rlboost: No such job: there is no job\n")


def test_a_model_on_another_machine_needs_its_small_files_here(system: System, base: Path) -> None:
    [engine] = system.trained(1)
    system.is_job("/far/away/model")
    refused = system.export()
    assert refused.exit_code == 2
    assert "the job's model /far/away/model is on another machine" in refused.stderr
    assert "name the copy with --model" in refused.stderr
    assert system.export("--model", str(base)).exit_code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(system.out)
    assert_equal(model, engine)
