"""What `rlboost config check` finds about a real model and its tokenizer, in the words of the trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.jobs import check as jobcheck
from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.user_code.curriculum import load_skip_function
from rlboost.services.trainer.adapters.user_code.loss import load_loss
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.process.extras import pip_install
from tests.support import rank_policies
from tests.support.model_folder import write_model, write_tokenizer, write_unmarked_model
from tests.support.packed_models import CONVOLUTION, write


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(write_model(tmp_path / "base", "llama-untied"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "t5 t6"}\n')
    (tmp_path / "mine.py").write_text(
        "def score(completions, **_): ...\n"
        "def loss(batch): ...\n"
        "def two(batch, more): ...\n"
        "def skip(means, step, columns): ...\n"
    )
    return tmp_path


def job(**changes: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 8}
    reward = {"function": "mine:score"}
    return {
        "model": "base",
        "data": {"train": "train.jsonl"},
        "reward": reward,
        "sampling": sampling,
        "steps": 1,
    } | changes


def check(**changes: Any) -> list[str]:
    Path("job.yaml").write_text(yaml.safe_dump(job(**changes)))
    return jobcheck.check(Path("job.yaml"), []).problems


def trainers_words(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_tokens_of_a_model_that_is_not_packed_cannot_be_divided(folder: Path) -> None:
    write_tokenizer(write(CONVOLUTION, folder / "conv"))
    [problem] = check(model="conv", trainer={"context_parallel": 2})
    assert problem.startswith("trainer.context_parallel: lfm2 has layers that compute more than causal attention")


def test_a_job_that_fits_its_model_has_no_problem() -> None:
    assert check() == []


def test_a_prompt_that_does_not_fit_the_models_positions_is_named(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "t5"}\n' + json.dumps({"prompt": "t5 " * 155}) + "\n")
    [problem] = check()
    assert problem.startswith(
        "train.jsonl, line 2: 156 prompt tokens and sampling.max_tokens 8 do not fit the model's 160"
    )
    assert problem == trainers_words(lambda: load_data(parse(job()), Path("base")))


def test_an_evaluation_that_cannot_be_planned_is_named() -> None:
    [problem] = check(data={"train": "train.jsonl", "eval": "train.jsonl"}, eval={"every": 1, "samples": 5000})
    assert problem.startswith("eval.samples: 5000 over 1 evaluation prompts is 5000 a prompt")


def test_a_tokenizer_that_is_missing_is_named_without_loading_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", None)
    (folder / "base/tokenizer.json").unlink()
    [problem] = check()
    assert problem.startswith("model base has no tokenizer (tokenizer.json, ")
    assert problem == trainers_words(lambda: load_data(parse(job()), Path("base")))


def test_a_model_without_an_end_token_is_named(folder: Path) -> None:
    write_tokenizer(folder / "base", eos=False)
    [problem] = check()
    assert problem == "model base: neither tokenizer nor config names an end token (eos): completions never end"


def test_missing_lora_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    lora = {"elastic": {"weights": "lora"}, "lora": {"targets": ["q_proj", "query"]}}
    [problem] = check(**lora)
    assert problem == (
        "lora.targets: the model has no layer 'query', but down_proj, embed_tokens, gate_proj, k_proj, lm_head, "
        "o_proj, q_proj, up_proj, v_proj: name some of these, or all-linear"
    )
    spec = LoraSpec(targets=("q_proj", "query"))
    engine = TorchPolicy(PolicySettings(lora=spec), device="cpu")
    assert problem == trainers_words(lambda: engine.load_hf(Path("base")))
    assert check(elastic={"weights": "lora"}, lora={"targets": ["self_attn.q_proj", "up_proj"]}) == []


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        (
            {"tensor_parallel": 3},
            "trainer.tensor_parallel is 3, which does not divide the model's 4 attention heads: set a divisor",
        ),
        (
            {"pipeline_parallel": 2},
            "trainer.pipeline_parallel is 2, which does not divide the model's 3 layers: set a divisor",
        ),
        ({"pipeline_parallel": 3}, None),
    ],
)
def test_a_model_that_cannot_be_cut_up_is_named(
    trainer: dict[str, Any], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    assert check(trainer={"backend": "megatron", **trainer}) == ([problem] if problem else [])


def test_experts_that_cannot_be_divided_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    trainer = {"backend": "megatron", "data_parallel": 3, "expert_parallel": 3}
    [problem] = check(trainer=trainer)
    assert problem.startswith("trainer.expert_parallel is for mixtures of experts, but base (model type llama)")
    shutil.copytree(rank_policies.write(folder / "mixture", "qwen3-moe"), folder / "base", dirs_exist_ok=True)
    [problem] = check(trainer=trainer)
    assert problem == "trainer.expert_parallel is 3, which does not divide the model's 8 experts: set a divisor"
    assert check(trainer={**trainer, "data_parallel": 4, "expert_parallel": 4}) == []


def test_model_type_unsupported_by_megatron_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    write_model(folder / "base", "gpt2")
    [problem] = check(trainer={"backend": "megatron"})
    assert problem.startswith("trainer.backend: megatron does not support model type gpt2")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_positions_unsupported_by_megatron_are_named(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    config = json.loads((folder / "base/config.json").read_text())
    del config["rope_parameters"]

    def problems(rope_type: str) -> list[str]:
        (folder / "base/config.json").write_text(json.dumps({**config, key: {"rope_type": rope_type, "factor": 2.0}}))
        return check(trainer={"backend": "megatron"})

    assert problems("llama3") == []
    [problem] = problems("dynamic")
    assert problem == "trainer.backend: megatron does not support rope type dynamic: use trainer.backend: torch"


@pytest.mark.parametrize(
    ("write_base", "changes", "settings", "problem"),
    [
        (
            write_unmarked_model,
            {"trainer": {"activation_checkpointing": True}},
            {"activation_checkpointing": True},
            "trainer.activation_checkpointing: not supported for CTRLLMHead",
        ),
        (
            lambda folder: rank_policies.write(folder / "mixture", "qwen3-moe"),
            {"trainer": {"compile": True}},
            {"compile": True},
            "trainer.compile: not supported for Qwen3MoeForCausalLM",
        ),
        (
            lambda folder: write(CONVOLUTION, folder),
            {"trainer": {"compile": True}},
            {"compile": True},
            "trainer.compile: not supported for Lfm2ForCausalLM",
        ),
        (
            lambda folder: write_model(folder, "gpt2"),
            {"elastic": {"weights": "lora"}, "lora": {"targets": ["c_attn"]}},
            {"lora": LoraSpec(targets=("c_attn",))},
            "lora.targets: transformer.h.0.attn.c_attn is not a linear layer",
        ),
    ],
    ids=["activation-checkpointing", "compile-experts", "compile-convolution", "lora"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_setting_that_the_model_does_not_support_is_named(
    write_base: Callable[[Path], Path],
    changes: dict[str, Any],
    settings: dict[str, Any],
    problem: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    if "lora" not in changes:
        assert check(**changes) == []
    model = write_tokenizer(write_base(folder / "other"))
    [found] = check(model=str(model), **changes)
    assert found.startswith(problem)
    engine = TorchPolicy(PolicySettings(**settings), device="cpu")
    assert found == trainers_words(lambda: engine.load_hf(model))
    assert check(model=str(model)) == []


def test_layers_that_fsdp_cannot_shard_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    asked = {"trainer": {"data_parallel": 2}}
    assert check(model=str(write_tokenizer(write_model(folder / "gpt2", "gpt2"))), **asked) == []
    [problem] = check(model=str(write_tokenizer(write_unmarked_model(folder / "unmarked"))), **asked)
    assert problem.startswith("trainer.data_parallel, trainer.context_parallel: not supported for CTRLLMHead")


def test_check_loads_trainer_functions_like_the_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    monkeypatch.syspath_prepend(str(folder))
    fit = {"algorithm": {"loss": "mine:loss"}}
    assert check(data={"train": "train.jsonl", "curriculum": {"function": "mine:skip"}}, **fit) == []
    unfit = {"algorithm": {"loss": "mine:two"}}
    loss, skips = check(data={"train": "train.jsonl", "curriculum": {"function": "mine:none"}}, **unfit)
    assert loss == (
        "algorithm.loss: mine:two takes (batch, more), but is called with (batch): missing a required argument: 'more'"
    )
    assert loss == trainers_words(lambda: load_loss("mine:two"))
    assert skips.startswith("data.curriculum.function: mine:none is not a function: mine has no 'none'")
    assert skips == trainers_words(lambda: load_skip_function("mine:none", []))


def test_missing_libraries_are_warnings_if_a_trainer_can_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    there = {"torch", "transformers"}
    for module in ("rlboost.shared.process.extras", "rlboost.shared.job.run_log"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: name if name in there else None)
    asked: dict[str, Any] = {
        "data": {"train": "openai/gsm8k"},
        "log": {"wandb": {"project": "p"}, "tensorboard": True},
        "trainer": {"backend": "megatron"},
    }
    assert check(**asked) == []
    assert jobcheck.check(Path("job.yaml"), []).warnings == [
        f"log.wandb needs wandb: install it with: {pip_install('logs')}",
        f"log.tensorboard needs tensorboard: install it with: {pip_install('logs')}",
        f"trainer.backend: megatron needs megatron-core: {pip_install('megatron')}",
        f"data.train: openai/gsm8k needs the library datasets: {pip_install('data')}",
    ]
    there.clear()
    found = jobcheck.check(Path("job.yaml"), [])
    assert (found.problems, found.warnings) == ([], [])


def test_own_code_that_is_too_slow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.data_problem", lambda _: "")
    monkeypatch.setattr("rlboost.jobs.user_code_check._LIMIT_S", 0.0)
    assert check(algorithm={"loss": "mine:loss"}) == [
        "reward.function: importing mine:score took more than 0 s",
        "algorithm.loss: importing mine:loss took more than 0 s",
    ]
