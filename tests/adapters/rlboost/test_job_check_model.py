"""What `rlboost config check` finds about a real model and its tokenizer, in the words of the trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from safetensors.torch import load_file, save_file

from rlboost.jobs import check as jobcheck
from rlboost.jobs.model_check import DataFindings
from rlboost.services.trainer.adapters.data import check_teacher, load_data
from rlboost.services.trainer.adapters.other_models import other_models
from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.adapters.torch.models import empty_model
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.user_code import load_loss, load_skip_function
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.model.folder import declare_scores
from rlboost.shared.process.modules import pip_install
from rlboost.shared.process.waiting import Waits
from tests.support import rank_policies
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer, write_unmarked_model
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


def test_check_prints_the_first_pair_as_the_model_sees_it(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "t5 t6", "chosen": " t7", "rejected": " t8 t9"}\n')
    raw = {"kind": "dpo", "model": "base", "data": {"train": "train.jsonl", "prompts_per_step": 1}, "steps": 1}
    Path("job.yaml").write_text(yaml.safe_dump(raw))
    found = jobcheck.check(Path("job.yaml"), [])
    assert found.problems == []
    assert found.example.splitlines() == [
        "the first prompt, as the model sees it (3 tokens):",
        "  | <bos> t5 t6",
        "and what it is trained to answer (2 tokens):",
        "  | t7 <eos>",
        "and what is worse (3 tokens):",
        "  | t8 t9 <eos>",
    ]


def test_check_prints_the_first_pair_of_a_reward_model_and_refuses_its_folder_as_a_policy(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "t5 t6", "chosen": " t7 t8", "rejected": " t7 t9"}\n')
    raw = {"kind": "reward", "model": "base", "data": {"train": "train.jsonl", "prompts_per_step": 1}, "steps": 1}
    found = jobcheck.check_job(raw)
    assert found.problems == []
    assert found.example.splitlines() == [
        "the first prompt, as the model sees it (4 tokens):",
        "  | <bos> t5 t6 t7",
        "and what is better (2 tokens):",
        "  | t8 <eos>",
        "and what is worse (2 tokens):",
        "  | t9 <eos>",
    ]
    declare_scores(folder / "base", "LlamaForSequenceClassification", 0)
    [problem] = check()
    assert problem.startswith("config.json: the model is a reward model (LlamaForSequenceClassification), which")
    assert problem == trainers_words(lambda: TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base")))
    [problem] = jobcheck.check_job(raw).problems
    assert problem == "model base has no tensor score.weight, the head of a reward model: copy the model again"
    engine = TorchPolicy(PolicySettings(scores=True), device="cpu")
    assert problem == trainers_words(lambda: engine.load_hf(Path("base")))


def test_a_reward_model_that_is_none_is_named() -> None:
    [problem] = check(reward={"model": "base"})
    assert problem.startswith("reward.model: model base is no reward model: config.json has LlamaForCausalLM, not one")
    [problem] = check(reward={"model": "nowhere"})
    assert problem.startswith("reward.model: there is no folder nowhere")
    [problem] = check(reward={"functions": [{"model": "mine.py"}, {"function": "mine:score"}]})
    assert problem == "reward.model: mine.py has no config.json: it is not a Hugging Face model directory"


def test_a_prompt_that_does_not_fit_the_models_positions_is_named(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "t5"}\n' + json.dumps({"prompt": "t5 " * 155}) + "\n")
    [problem] = check()
    assert problem.startswith(
        "train.jsonl, line 2: 156 prompt tokens and sampling.max_tokens 8 do not fit the model's 160"
    )
    assert problem == trainers_words(lambda: load_data(parse(job()), Path("base")))


@pytest.mark.parametrize("changes", [{}, {"models": {"big": {"model": "big"}}}], ids=["on the trainer", "on workers"])
def test_a_teacher_with_too_few_positions_is_named(folder: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(folder / "base", folder / "big")
    config = folder / "big" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8}))
    [problem] = check(algorithm={"name": "distill", "teacher": {"model": "big"}}, reward=None, **changes)
    assert problem.startswith("algorithm.teacher.model: big has 8 positions, fewer than the ")


def test_held_out_rows_that_the_job_does_not_read_are_noted() -> None:
    data = {"train": "train.jsonl", "eval": "train.jsonl", "prompts_per_step": 1}
    found = jobcheck.check_job(job(data=data))
    assert list(found.notices) == ["data.eval: only rlboost eval reads it, since there is no section eval"]
    assert not jobcheck.check_job(job(data=data, eval={"every": 1, "samples": 1})).notices


def test_special_token_that_the_tokenizer_lacks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which these are: tests/adapters/trainer/test_prompt_tokens.py."""
    monkeypatch.setattr(PromptTokenizer, "split_tokens", ["<|user|>"])
    [notice] = jobcheck.check_job(job(data={"train": "train.jsonl", "prompts_per_step": 1})).notices
    assert notice == "model: the chat template writes <|user|>, which the tokenizer splits into several tokens"


def test_prompts_with_answers_and_turns_that_no_completion_ends_are_warned_of(folder: Path) -> None:
    """Rows for fine-tuning as prompts, and a chat template with an end of turn that is not among the end tokens."""
    turn = "{{ 't7' if m.role == 'assistant' else 't3' }} {{ m.content }} <pad>"
    prompted = "{% if add_generation_prompt %}t7 {% endif %}"
    with_chat_template(folder / "base", f"{{% for m in messages %}}{turn} {{% endfor %}}{prompted}")
    rows = [
        [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6"}],
        [{"role": "user", "content": "t5"}],
    ]
    given = {"train": "train.jsonl", "prompt_key": "messages", "prompts_per_step": 1}

    def advice(*rows: Any, **changes: Any) -> list[str]:
        (folder / "train.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
        found = jobcheck.check_job(job(data=given, **changes))
        assert not found.problems
        return list(found.advice)

    unended, answers = advice(rows[0])
    assert unended == (
        "model: its chat template ends a turn with '<pad>', at which completions do not end, so they run on: add "
        "its id to eos_token_id in the model's generation_config.json"
    )
    assert answers.startswith("data.train: every prompt ends with an assistant message, which the model continues: ")
    assert advice(*rows) == [unended]
    assert not advice("t5 t6")
    (folder / "base/generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert advice(rows[0]) == [answers]
    assert not advice(rows[0], kind="sft", reward=None, sampling=None)


def test_an_evaluation_that_cannot_be_planned_is_named() -> None:
    [problem] = check(data={"train": "train.jsonl", "eval": "train.jsonl"}, eval={"every": 1, "samples": 5000})
    assert problem.startswith("eval.samples: 5000 over 1 evaluation prompts is 5000 a prompt")


def test_a_tokenizer_that_is_missing_is_named_without_loading_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", None)
    (folder / "base/tokenizer.json").unlink()
    [problem] = check()
    assert problem.startswith("model base has no tokenizer (tokenizer.json, ")
    assert problem == trainers_words(lambda: load_data(parse(job()), Path("base")))


def test_a_model_without_an_end_token_is_named(folder: Path) -> None:
    write_tokenizer(folder / "base", eos=False)
    [problem] = check()
    assert problem == "model base: neither tokenizer nor config names an end token (eos): completions never end"


def test_missing_lora_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
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
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    assert check(trainer={"backend": "megatron", **trainer}) == ([problem] if problem else [])


def test_experts_that_cannot_be_divided_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    trainer = {"backend": "megatron", "data_parallel": 3, "expert_parallel": 3}
    [problem] = check(trainer=trainer)
    assert problem.startswith("trainer.expert_parallel is for mixtures of experts, but base (model type llama)")
    shutil.copytree(rank_policies.write(folder / "mixture", "qwen3-moe"), folder / "base", dirs_exist_ok=True)
    [problem] = check(trainer=trainer)
    assert problem == "trainer.expert_parallel is 3, which does not divide the model's 8 experts: set a divisor"
    assert check(trainer={**trainer, "data_parallel": 4, "expert_parallel": 4}) == []


def test_model_type_unsupported_by_megatron_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    write_model(folder / "base", "gpt2")
    [problem] = check(trainer={"backend": "megatron"})
    assert problem.startswith("trainer.backend: megatron does not support model type gpt2")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_positions_unsupported_by_megatron_are_named(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
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
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    if "lora" not in changes:
        assert check(**changes) == []
    model = write_tokenizer(write_base(folder / "other"))
    [found] = check(model=str(model), **changes)
    assert found.startswith(problem)
    engine = TorchPolicy(PolicySettings(**settings), device="cpu")
    assert found == trainers_words(lambda: engine.load_hf(model))
    assert check(model=str(model)) == []


def test_layers_that_fsdp_cannot_shard_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    asked = {"trainer": {"data_parallel": 2}}
    assert check(model=str(write_tokenizer(write_model(folder / "gpt2", "gpt2"))), **asked) == []
    [problem] = check(model=str(write_tokenizer(write_unmarked_model(folder / "unmarked"))), **asked)
    assert problem.startswith("trainer.data_parallel, trainer.context_parallel: not supported for CTRLLMHead")


def test_check_loads_trainer_functions_like_the_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
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
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    there = {"torch", "transformers"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
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
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    monkeypatch.setattr("rlboost.jobs.model_check._LIMIT_S", 0.0)
    assert check(algorithm={"loss": "mine:loss"}) == [
        "reward.function: trying mine:score took more than 0 s",
        "algorithm.loss: trying mine:loss took more than 0 s",
    ]


def cut(weights: Path) -> str:
    weights.write_bytes(weights.read_bytes()[:1000])
    return "model.safetensors"


def cut_at_the_end(weights: Path) -> str:
    weights.write_bytes(weights.read_bytes()[:-1])
    return "model.safetensors"


def empty(weights: Path) -> str:
    weights.write_bytes(b"")
    return "model.safetensors"


def a_page(weights: Path) -> str:
    weights.write_text("<!DOCTYPE html><html>the model has moved</html>")
    return "model.safetensors"


def a_pointer(weights: Path) -> str:
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return "model.safetensors"


def with_zeros(weights: Path) -> str:
    raw = weights.read_bytes()
    weights.write_bytes(raw[:8] + bytes(len(raw) - 8))
    return "model.safetensors"


def wrong_types(weights: Path) -> str:
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F64"', 1))
    return "model.safetensors"


def longer(weights: Path) -> str:
    weights.write_bytes(weights.read_bytes() + b"more")
    return "model.safetensors"


def in_shards(weights: Path) -> tuple[Path, Path]:
    names = [weights.with_name(f"model-0000{i}-of-00002.safetensors") for i in (1, 2)]
    tensors = load_file(weights)
    half = len(tensors) // 2
    places: dict[str, str] = {}
    for file, part in zip(names, (list(tensors)[:half], list(tensors)[half:]), strict=True):
        save_file({name: tensors[name] for name in part}, file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file.name)
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    weights.unlink()
    return names[0], names[1]


def shard_missing(weights: Path) -> str:
    in_shards(weights)[1].unlink()
    return "model-00002-of-00002.safetensors is missing"


def shard_cut(weights: Path) -> str:
    return cut_at_the_end(in_shards(weights)[1]).replace("model", "model-00002-of-00002")


def shards_swapped(weights: Path) -> str:
    one, other = in_shards(weights)
    one.write_bytes(other.read_bytes())
    return "model-00001-of-00002.safetensors has no tensor"


def index_cut(weights: Path) -> str:
    in_shards(weights)
    cut_at_the_end(weights.with_name("model.safetensors.index.json"))
    return "model.safetensors.index.json"


def index_missing(weights: Path) -> str:
    in_shards(weights)
    weights.with_name("model.safetensors.index.json").unlink()
    return "model.safetensors.index.json"


@pytest.mark.parametrize(
    "damage",
    [
        *(cut, cut_at_the_end, empty, a_page, a_pointer, with_zeros, wrong_types, longer),
        *(shard_missing, shard_cut, shards_swapped, index_cut, index_missing),
    ],
)
def test_damaged_weights_are_named_by_check_and_trainer(damage: Callable[[Path], str]) -> None:
    file = damage(Path("base/model.safetensors"))
    found = jobcheck.check_job(job(optimizer={"lr": 1e-3}))
    (problem,) = found.problems
    assert file in problem
    assert "copy" in problem
    assert not found.advice
    assert trainers_words(lambda: TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base"))) == problem


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("adapter_config.json", "base has a LoRA adapter (adapter_config.json): merge it"),
        (
            "pytorch_model.bin",
            "base has no *.safetensors file: save the model's weights there, not as pytorch_model.bin",
        ),
    ],
)
def test_folder_with_an_adapter_or_pickled_weights_is_refused_by_check_and_trainer(file: str, named: str) -> None:
    """Transformers would put the adapter on the model, and read the pickled file."""
    if file == "pytorch_model.bin":
        Path("base/model.safetensors").unlink()
    Path("base", file).write_text("{}")
    (problem,) = jobcheck.check_job(job()).problems
    assert named in problem
    words = trainers_words(lambda: TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base")))
    assert problem == f"model: {words}"
    spec, now = parse(job(models={"judge": {"model": "base"}})), datetime.now(UTC)
    load = partial(other_models, spec, "job-1", now, (), connect=Mock(), folder=Path(), waits=Waits(), limit_s=1.0)
    words = trainers_words(load)
    assert named in words
    assert words.startswith("models.judge.model: base has ")


def test_model_in_shards_has_no_problem() -> None:
    in_shards(Path("base/model.safetensors"))
    assert check() == []
    TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base"))


@pytest.mark.parametrize("kind", ["missing", "other shape"])
def test_weight_that_transformers_would_draw_is_refused(kind: str) -> None:
    tensors = load_file(Path("base/model.safetensors"))
    name = next(name for name in tensors if "down_proj" in name)
    tensor = tensors.pop(name)
    if kind == "other shape":
        tensors[name] = tensor[:3].contiguous()
    save_file(tensors, Path("base/model.safetensors"), metadata={"format": "pt"})
    assert name in trainers_words(lambda: TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base")))


@pytest.mark.parametrize("family", ["llama-untied", "qwen3-tied"])
def test_a_config_that_transformers_refuses_is_named(folder: Path, family: str) -> None:
    """Its configurations raise an exception of their own for a value of the wrong type or that others contradict."""
    write_model(folder / "base", family)
    config = json.loads((folder / "base/config.json").read_text())
    wrong = {"hidden_size": "wide"} if family == "llama-untied" else {"num_hidden_layers": 7}
    (folder / "teacher").mkdir()
    (folder / "teacher/config.json").write_text(json.dumps(config | wrong))
    spec = parse(job(algorithm={"name": "distill", "teacher": {"model": "teacher"}}))
    with pytest.raises(ConfigError, match=r"teacher\.model: config\.json of .* cannot be loaded"):
        check_teacher(spec, load_data(spec, folder / "base"), folder / "teacher")
    (folder / "base/config.json").write_text(json.dumps(config | wrong))
    assert any("tokenizer and config.json cannot be loaded: " in problem for problem in check()), check()
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        empty_model(folder / "base", "sdpa")


def test_weights_of_other_shapes_than_the_config_describes_are_named_by_check_and_trainer(folder: Path) -> None:
    file = folder / "base/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"intermediate_size": 40}))
    (problem,) = check()
    assert problem == trainers_words(lambda: TorchPolicy(PolicySettings(), device="cpu").load_hf(Path("base")))
    assert "mlp.down_proj.weight has the shape" in problem


@pytest.mark.parametrize(
    "changes", [{"is_encoder_decoder": True, "architectures": ["T5Model"]}, {"architectures": ["BertForMaskedLM"]}]
)
def test_model_with_an_encoder_is_named(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "base/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (problem,) = check()
    assert f"the model has an encoder ({changes['architectures'][0]}), and only decoders can be trained" in problem
