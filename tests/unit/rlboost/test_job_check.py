"""What `rlboost config check` finds in the data and the reward that a job names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.jobs import check as jobcheck
from rlboost.jobs.file import complete
from rlboost.jobs.model_check import DataFindings, MissingHere
from tests.support import fake_gpus

MESSAGES = '{"prompt": [{"role": "user", "content": "1+1="}]}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "base/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (tmp_path / "base/tokenizer.json").touch()
    # It tokenizes, with a real model: tests/adapters/rlboost/test_job_check_model.py.
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "my_reward.py").write_text(
        "def score(completions, **_): ...\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
        "def other(text): ...\n"
        "def needs(completions, *, ground_truth, level=1, **_): ...\n"
    )
    return tmp_path


def check(**changes: Any) -> list[str]:
    job = {
        "model": "base",
        "data": {"train": "train.jsonl"},
        "reward": {"functions": [{"function": "my_reward:score"}, {"function": "my_reward:compute_score"}]},
        "steps": 1,
    }
    job = {name: value for name, value in {**job, **changes}.items() if value is not None}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    return jobcheck.check(Path("job.yaml"), []).problems


def test_chat_messages_need_a_model_with_a_chat_template(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1"}\n' + MESSAGES)
    [problem] = check(reward={"function": "my_reward:score"})
    assert problem.startswith("data.train: train.jsonl line 2 has chat messages, but base has no chat template")
    (folder / "base/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert check(reward={"function": "my_reward:score"}) == []
    (folder / "base/tokenizer_config.json").write_text("{}")
    (folder / "base/chat_template.jinja").write_text("{{ messages }}")
    assert check(reward={"function": "my_reward:score"}) == []


@pytest.mark.parametrize("changes", [{"reward": {"function": "my_reward:score"}}, {"kind": "sft", "reward": None}])
def test_images_are_checked_for_a_model_that_is_not_here(folder: Path, changes: dict[str, Any]) -> None:
    """The model of the documented job is an id, whose `config.json` the check does not have."""
    shows = '{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}'
    row = f'{{"prompt": [{shows}], "images": ["a.png"], "completion": "red"}}'
    (folder / "train.jsonl").write_text(row)
    assert check(model="Qwen/Qwen3-VL-2B-Instruct", **changes) == []
    (folder / "train.jsonl").write_text(row.replace('["a.png"]', '["a.png", "b.png"]'))
    [problem] = check(model="Qwen/Qwen3-VL-2B-Instruct", **changes)
    assert "the row has 2 images, and its messages show 1" in problem
    [problem] = check(**changes)  # a text model
    assert "the column 'images' is not shown to the model" in problem


def test_quantized_model_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "base/config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    [problem] = check(reward={"function": "my_reward:score"})
    assert "the model's weights are quantized (fp8): use the model in bfloat16" in problem
    assert 'RLBOOST_WORKER_VLLM_ARGS, such as {"quantization": "fp8_per_channel"}' in problem


def weights(folder: Path, name: str, dtype: str) -> None:
    header = json.dumps({name: {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.weight", "F8_E4M3"),  # ModelOpt: by hf_quant_config.json
        ("a.weight", "I8"),  # bitsandbytes
        ("a.qweight", "U8"),  # GPTQ, AWQ
        ("experts.gate_up_proj_blocks", "U8"),  # gpt-oss
    ],
)
def test_quantized_weights_are_refused_whatever_the_configuration_says(folder: Path, name: str, dtype: str) -> None:
    weights(folder / "base", name, dtype)
    reward = {"function": "my_reward:score"}
    (problem,) = check(reward=reward)
    assert f"base: model.safetensors has quantized weights ({name} is {dtype}): use the model in bfloat16" in problem
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}')
    weights(folder / "base", "a.position_ids", "U8")
    weights(other, "a.position_ids", "U8")
    (problem,) = check(reward=reward, models={"judge": {"model": "other"}})
    assert problem.startswith("models.judge.model: config.json: the model's weights are quantized (fp8)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n\n", "train.jsonl is empty"),
        ('{"prompt": 5}\n', "train.jsonl line 1: 'prompt' is neither text nor a list of chat messages"),
    ],
)
def test_an_invalid_prompt_is_named(folder: Path, text: str, problem: str) -> None:
    (folder / "train.jsonl").write_text(text)
    [found] = check(reward={"function": "my_reward:score"})
    assert found.startswith(f"data.train: {problem}")


def test_column_that_may_be_a_part_of_the_prompt_is_advice(folder: Path) -> None:
    """A reward may use it, which a job for fine-tuning has not."""
    (folder / "base/chat_template.jinja").write_text("{{ messages }}")
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "system": "You are short."}\n')
    advice = "data: the column 'system' ('You are short.') is not shown to the model: put it into the prompt, unless "
    for data, found in (({}, True), ({"system_prompt": ""}, False)):
        assert check(reward={"function": "my_reward:score"}, data={"train": "train.jsonl", **data}) == []
        lines = jobcheck.check(Path("job.yaml"), []).advice
        assert any(line.startswith(advice) for line in lines) == found


def test_resume_folder_must_exist_unless_in_an_object_store(folder: Path) -> None:
    assert check(trainer={"resume": ".rlboost/runs/a"})[0].startswith(
        "trainer.resume: there is no .rlboost/runs/a: give"
    )
    (folder / ".rlboost/runs/a").mkdir(parents=True)
    for resume in (".rlboost/runs/a", "s3://checkpoints/a", "auto", "never"):
        assert not [problem for problem in check(trainer={"resume": resume}) if "resume" in problem]


@pytest.mark.parametrize("place", [".rlboost/runs/a", ".rlboost/runs/a/checkpoints/step-000030"])
def test_resume_of_a_run_without_steps_left_is_refused(folder: Path, place: str) -> None:
    for step in (20, 30):
        (folder / f".rlboost/runs/a/checkpoints/step-{step:06d}").mkdir(parents=True)
    refusal = f"trainer.resume: {place} has 30 steps, and steps is 30: raise steps above 30"
    assert refusal in check(steps=30, trainer={"resume": place})
    assert not [problem for problem in check(steps=31, trainer={"resume": place}) if "resume" in problem]


@pytest.mark.parametrize("model", ["./bse", "../nowhere/base", "a/b/c", "runs/typo", "/nowhere", "~/nowhere", "gpt2"])
def test_a_model_that_looks_like_a_path_must_be_there(folder: Path, model: str) -> None:
    (folder / "runs").mkdir()
    (problem,) = check(model=model)
    assert problem.startswith(f"model: there is no folder {model}: ")


def test_a_mistyped_model_folder_is_refused_with_the_nearest(folder: Path) -> None:
    (folder / "runs/sums-79d5f6").mkdir(parents=True)
    assert "did you mean runs/sums-79d5f6?" in check(model="runs/sums-79d5f7")[0]
    assert "(runs/ has sums-79d5f6)" in check(model="runs/else")[0]
    assert "did you mean base?" in check(model="./bse")[0]


def test_a_model_that_may_be_a_hugging_face_id_is_a_notice() -> None:
    assert check(model="Qwen/Qwen3-0.6B") == []
    (notice,) = jobcheck.check(Path("job.yaml"), []).notices
    assert "Qwen/Qwen3-0.6B is not a folder here: it is taken for a Hugging Face id" in notice


def test_each_of_several_functions_is_tried() -> None:
    assert check() == []
    names = ("score", "other", "compute_score", "none")
    missing, unfit = sorted(check(reward={"functions": [{"function": f"my_reward:{name}"} for name in names]}))
    assert missing == "reward.function: my_reward:none is not a reward function: my_reward has no 'none'"
    assert unfit.startswith("reward.function: my_reward:other is not a reward function: it takes (text)")


def test_a_column_that_the_reward_needs_is_named_with_those_of_the_data(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n{"prompt": "1", "answer": "1"}\n')
    [problem] = check(reward={"function": "my_reward:needs"})
    assert problem.startswith(
        "reward.function: my_reward:needs needs the column 'ground_truth', but train.jsonl line 2 has answer: rename"
    )
    assert check(reward={"function": "my_reward:compute_score"}) == []
    [problem] = check(reward={"function": "my_reward:needs", "arguments": {"ground_truth": "1"}})
    assert problem.startswith("reward.arguments: 'ground_truth' is also a column of train.jsonl line 1, and")
    (folder / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    assert check(reward={"function": "my_reward:needs", "arguments": {"ground_truth": "1"}}) == []


def test_a_reward_of_verls_signature_needs_a_ground_truth(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1", "target": "1"}\n')
    [problem] = check(reward={"function": "my_reward:compute_score"})
    assert "needs one of the columns reward_model, ground_truth" in problem
    assert "train.jsonl line 1 has target" in problem
    (folder / "train.jsonl").write_text('{"prompt": "1", "reward_model": {"ground_truth": "1"}}\n')
    assert check(reward={"function": "my_reward:compute_score"}) == []


@pytest.mark.parametrize("function", ["rlboost.rewards.math:score", "rlboost.rewards.code:score"])
def test_data_that_a_reward_of_ours_cannot_judge_are_a_problem(folder: Path, function: str) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1", "target": "1"}\n' * 2)
    [problem] = check(reward={"function": function})
    assert problem.startswith(f"reward.function: {function} gives no reward to 2 of the 2 rows that were tried")
    assert "train.jsonl line 1" in problem


@pytest.mark.parametrize("gold", ["null", "true", "[1]", "NaN", '"nan"', '"None"', '"[]"', '"#### "', '" "'])
def test_unusable_ground_truths_are_counted(folder: Path, gold: str) -> None:
    rows = [f'{{"prompt": "1", "answer": {value}}}\n' for value in ("1", gold, '"#### 3"', gold)]
    (folder / "train.jsonl").write_text("".join(rows))
    assert check(reward={"function": "rlboost.rewards.math:score"}) == []
    [advice] = [line for line in jobcheck.check(Path("job.yaml"), []).advice if "gives no reward" in line]
    assert "to 2 of the 4 rows that were tried, such as train.jsonl line 2: the ground truth" in advice


def test_byte_order_mark_is_skipped(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1"}\n', encoding="utf-8-sig")
    assert check(reward={"function": "my_reward:score"}) == []


def test_a_dataset_on_the_hub_is_left_to_the_trainer() -> None:
    assert check(data={"train": "openai/gsm8k"}, reward={"function": "my_reward:score"}) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "1", "completion": "2"}\n', ""),
        (
            '{"prompt": "1"}\n',
            "train.jsonl line 1: no key 'completion', nor chat messages that end with the assistant's",
        ),
        ('{"completion": "1"}\n', "train.jsonl line 1: no key 'prompt' (keys: completion)"),
        (
            '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n',
            "train.jsonl line 1 has chat messages, but base",
        ),
    ],
)
def test_a_job_that_imitates_needs_completions_and_no_reward(folder: Path, text: str, problem: str) -> None:
    (folder / "train.jsonl").write_text(text)
    job = {"kind": "sft", "model": "base", "data": {"train": "train.jsonl"}, "steps": 1}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    found = jobcheck.check(Path("job.yaml"), []).problems
    assert len(found) == bool(problem)
    assert all(line.startswith(f"data.train: {problem}") for line in found)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "1", "chosen": "2", "rejected": "3"}', ""),
        ('{"prompt": "1", "chosen": "2"}', "train.jsonl line 1: no key 'rejected' (keys: prompt, chosen)"),
        ('{"prompt": "1", "chosen": "2", "rejected": "2"}', "train.jsonl line 1: 'chosen' and 'rejected' are equal"),
    ],
)
def test_a_job_on_pairs_needs_two_completions_and_no_reward(folder: Path, row: str, problem: str) -> None:
    (folder / "train.jsonl").write_text(row + "\n")
    job = {"kind": "dpo", "model": "base", "data": {"train": "train.jsonl"}, "steps": 1}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    found = jobcheck.check(Path("job.yaml"), []).problems
    assert len(found) == bool(problem)
    assert all(line.startswith(f"data.train: {problem}") for line in found)


def test_a_job_that_only_evaluates_needs_no_training_data(folder: Path) -> None:
    job = {"kind": "eval", "model": "base", "data": {"eval": "train.jsonl"}, "reward": {"function": "my_reward:score"}}
    Path("job.yaml").write_text(yaml.safe_dump({**job, "eval": {"samples": 4}}))
    assert jobcheck.check(Path("job.yaml"), []).problems == []
    Path("job.yaml").write_text(yaml.safe_dump({**job, "eval": {"samples": 4}, "steps": 3}))
    assert jobcheck.check(Path("job.yaml"), []).problems == ["a job of kind eval trains nothing: remove steps"]


def test_rows_of_each_held_out_set_are_checked(folder: Path) -> None:
    (folder / "math.jsonl").write_text('{"problem": "1", "ground_truth": "1"}\n')
    reward = {"function": "my_reward:compute_score"}
    (folder / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    sets: dict[str, Any] = {"math": {"data": "math.jsonl", "prompt_key": "problem"}, "aime": {"data": "missing.jsonl"}}
    [problem] = check(reward=reward, eval={"sets": sets})
    assert problem.startswith("eval.sets.aime.data: missing.jsonl")
    del sets["math"]["prompt_key"], sets["aime"]
    [problem] = check(reward=reward, eval={"sets": sets})
    assert problem.startswith("eval.sets.math.data: math.jsonl line 1: no key 'prompt' (keys: problem, ground_truth)")
    (folder / "math.jsonl").write_text('{"prompt": "1"}\n')
    [problem] = check(reward=reward, eval={"sets": sets})
    assert "needs a ground_truth" in problem or "math.jsonl line 1" in problem


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "import nothing_like_it",
            "ModuleNotFoundError: No module named 'nothing_like_it' (sick.py:1); install it, or fix sick",
        ),
        ("def score(:", "SyntaxError: invalid syntax (sick.py, line 1); fix sick"),
        ("raise ValueError('one\\ntwo')", "ValueError: one two (sick.py:1); fix sick"),
        ("raise AttributeError('own')", "AttributeError: own (sick.py:1); fix sick"),
        ("exit('enough')", "SystemExit: enough (sick.py:1); fix sick"),
    ],
)
def test_a_failing_module_is_not_reported_as_missing(folder: Path, code: str, why: str) -> None:
    (folder / "sick.py").write_text(code)
    [problem] = check(reward={"function": "sick:score"})
    assert problem == f"reward.function: sick:score cannot be imported: {why}"


def test_a_missing_module_is_reported_with_the_folder(folder: Path) -> None:
    [problem] = check(reward={"function": "my_rewards:score"})
    assert problem == (
        "reward.function: my_rewards:score cannot be imported: ModuleNotFoundError: No module named 'my_rewards', "
        f"searched from {folder}; name it from there, as jobs.my_rewards in a subfolder jobs, start the trainer in a "
        "folder from which 'import my_rewards' works, or add that folder to PYTHONPATH"
    )


def test_a_module_that_exits_the_process_is_reported(folder: Path) -> None:
    (folder / "sick.py").write_text("import os\nos._exit(0 or 3)")
    assert check(reward={"function": "sick:score"}) == ["reward.function: trying sick:score ended its process"]


def test_only_missing_files_and_modules_are_missing_here(folder: Path) -> None:
    (folder / "broken.jsonl").write_text("no json\n")
    wrong = {
        "model": "far/away/model",
        "trainer": {"resume": "runs/a"},
        "data": {"train": ["train.jsonl", "shards/*.jsonl"], "eval": "broken.jsonl"},
        "reward": {"functions": [{"function": "their_reward:f", "name": "f"}, {"function": "my_reward:none"}]},
    }
    found = {problem.partition(": ")[2][:20]: isinstance(problem, MissingHere) for problem in check(**wrong)}
    assert list(found.values()) == [True, True, True, False, True, False], found


def test_cluster_file_adds_what_does_not_fit_on_its_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_gpus.install(folder / 'bin', 2)}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (folder / "cluster.yaml").write_text("gpus: 0-1\nengine: torch\n")
    check(trainer={"data_parallel": 4})
    command = ["config", "check", "job.yaml", "--cluster", "cluster.yaml"]
    (folder / "base/config.json").write_text('{"num_attention_heads": 4}')
    header = b'{"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}'
    (folder / "base/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "trains in 4 processes with a GPU each, and the trainer has 2 GPUs" in result.stderr
    result = CliRunner().invoke(app, [*command[:3], "trainer.data_parallel=2", *command[3:]])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(("isolated", "n_warnings"), [(True, 0), (False, 1)])
def test_check_warns_if_generated_programs_are_not_isolated(isolated: bool, n_warnings: int) -> None:
    Path("train.jsonl").write_text('{"prompt": "1+1=", "tests": "assert True"}\n')
    reward = {"function": "rlboost.rewards.code:score", "arguments": {"isolated": isolated}}
    job = {"model": "base", "data": {"train": "train.jsonl"}, "reward": reward, "steps": 1}
    found = jobcheck.check_job(job)
    assert found.problems == []
    assert len([text for text in found.advice if "isolated: False lets generated programs" in text]) == n_warnings


@pytest.mark.parametrize(
    ("kind", "sampling", "warning"),
    [
        ("rl", {"top_p": 1.0}, ""),
        ("rl", {"top_p": 0.95}, "sampling.top_p below 1 draws training samples from some of the tokens, "),
        ("rl", {"top_k": 20, "min_p": 0.1}, "sampling.top_k and sampling.min_p draw training samples from "),
        ("eval", {"top_p": 0.95}, ""),
    ],
)
def test_check_says_what_limits_of_sampling_mean_for_training(
    folder: Path, kind: str, sampling: dict[str, Any], warning: str
) -> None:
    job: dict[str, Any] = {"kind": kind, "model": "base", "reward": {"function": "my_reward:score"}}
    if kind == "rl":
        job |= {"steps": 1, "data": {"train": "train.jsonl"}}
    else:
        job |= {"data": {"eval": "train.jsonl"}, "eval": {}}
    Path("job.yaml").write_text(yaml.safe_dump({**job, "sampling": sampling}))
    found = jobcheck.check(Path("job.yaml"), [])
    assert found.problems == []
    assert [text[: len(warning)] for text in found.advice if " training samples from " in text] == [warning] * bool(
        warning
    )


def judged(prompt: str = "{prompt} {completion} {answer}", model: str = "judges/small") -> dict[str, Any]:
    return {"models": {"judge": {"model": model}}, "reward": {"judge": {"model": "judge", "prompt": prompt}}}


def test_judge_needs_a_model_with_a_chat_template(folder: Path) -> None:
    (problem,) = check(**judged(model="./judge"))
    assert problem.startswith("models.judge.model: there is no folder ./judge")
    (problem,) = check(**judged(model="base"))
    assert problem.startswith("models.judge.model: base has no chat template, with which a judge is asked")
    (folder / "base/chat_template.jinja").write_text("{{ messages }}")
    assert check(**judged(model="base")) == []


def test_other_models_are_reward_models_where_they_score_and_generate_elsewhere(folder: Path) -> None:
    reward = {"models": {"scores": {"model": "base"}}, "reward": {"model": "scores"}}
    (problem,) = check(**reward)
    assert problem.startswith("models.scores.model: model base is no reward model: config.json has no architecture")
    (problem,) = check(models={"scores": {"model": "./none"}}, reward={"model": "scores"})
    assert problem.startswith("models.scores.model: there is no folder ./none")
    scores = folder / "scores"
    scores.mkdir()
    (scores / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    (scores / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (problem,) = check(models={"other": {"model": "scores"}})
    assert problem.startswith("models.other.model: scores is a reward model (LlamaForSequenceClassification)")


def test_name_of_a_served_reward_model_is_no_path(folder: Path) -> None:
    """Even if there is such a folder: the reward processes would hold its model, and no part would name the served."""
    (folder / "scores").mkdir()
    job = {"model": "base", "data": {"train": "train.jsonl"}, "steps": 1, "models": {"scores": {"model": "scores"}}}
    parts = [{"model": "scores"}, {"model": "./base", "name": "held", "weight": 0.5}]
    resolved = complete({**job, "reward": {"functions": parts}})
    assert [part["model"] for part in resolved["reward"]["functions"]] == ["scores", str(folder / "base")]
    assert complete({**job, "reward": {"model": "scores"}})["reward"]["model"] == "scores"
    assert resolved["models"]["scores"]["model"] == str(folder / "scores")
    team = {"agent": {"function": "my_agent:run"}, "policies": {"critic": {"model": "base"}}, "models": {}}
    assert complete({**job, **team})["policies"]["critic"]["model"] == str(folder / "base")


def test_prompt_of_a_judge_names_columns_that_each_row_has(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "1"}\n')
    assert check(**judged("{completion}")) == []
    (problem,) = check(**judged())
    assert problem == (
        "reward.judge.prompt: names answer, and train.jsonl line 2 has no columns besides the prompt: "
        "correct the name, or write a brace that is meant as text twice"
    )


def test_a_split_or_subset_that_files_do_not_have_is_refused(folder: Path) -> None:
    """Files and a saved dataset without splits are read whole, so a job that names a split would train on all rows."""
    files = {"train": "train.jsonl", "eval": "train.jsonl"}
    assert check(data=files) == []
    [problem] = check(data={**files, "train_split": "train[:10]"})
    assert problem == (
        "data.train: train.jsonl has no splits, and the job names 'train[:10]': name the files of that split, or "
        "remove data.train_split"
    )
    assert "remove data.eval_split" in check(data={**files, "eval_split": "validation"})[0]
    assert check(data={**files, "subset": "main"})[0].startswith("data.subset: train.jsonl, train.jsonl has no conf")
    assert check(data={**files, "eval": "nobody/nothing", "subset": "main"}) == []
    sets = {"sets": {"math": {"data": "train.jsonl", "split": "test"}}}
    assert "remove eval.sets.math.split" in check(data=files, eval=sets)[0]
    sets = {"sets": {"math": {"data": "train.jsonl", "subset": "main"}}}
    assert check(data=files, eval=sets)[0].startswith("eval.sets.math.subset: train.jsonl has no configurations")


def test_all_names_taken_for_hugging_face_ids_are_notices(folder: Path) -> None:
    assert check(data={"train": ["train.jsonl", "date/train"]}, models={"judge": {"model": "judges/one"}}) == []
    notices = jobcheck.check(Path("job.yaml"), []).notices
    assert "models.judge.model: judges/one is not a folder here: it is taken for a Hugging Face id" in notices
    assert (
        "data.train: date/train is not a file or folder here: it is taken for a Hugging Face id, and its rows are not "
        "checked"
    ) in notices
