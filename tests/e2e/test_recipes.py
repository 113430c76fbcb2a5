"""Every recipe with a tiny model of its family and a few rows of its data's schema; some are trained for two steps."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlboost.jobs import check as jobcheck
from rlboost.jobs import new_folder
from rlboost.recipes import distinct, write_rows
from rlboost.recipes.countdown import prepare as countdown
from rlboost.recipes.dapo_math import prepare as dapo_math
from rlboost.recipes.gsm8k import prepare as gsm8k
from rlboost.recipes.preference import prepare as preference
from rlboost.recipes.reasoning_gym import prepare as reasoning_gym
from rlboost.recipes.sft_then_grpo import prepare as sft_then_grpo
from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.samples import RewardBatch
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import parse
from rlboost.shared.process.waiting import Waits
from tests.support.chat_tokenizers import TEMPLATES, byte_tokenizer
from tests.support.redis_server import executable

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]

GSM8K = {
    "question": "A pen costs $3 and a book $5. How much do 200 pens and 100 books cost?",
    "answer": "200 pens cost 3*200=$<<3*200=600>>600.\nWith 100 books it is 600+500=$<<600+500=1100>>1100.\n#### 1,100",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {"role": "user", "content": "Solve the problem. The last line is Answer: $Answer.\n\nWhat is 2^10 + 76?"}
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "1100", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
COUNTDOWN = {"target": 98, "nums": [44, 19, 35]}
PAIR = {
    "chosen": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello!"}],
    "rejected": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "No."}],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}


class Case(NamedTuple):
    """What a recipe is tried with."""

    family: str
    make_data: Callable[[], Mapping[str, list[Any]]] = dict
    """Returns the rows of each file that the recipe's data preparation writes."""
    shown: str = ""
    """In the first prompt that `rlboost config check` prints."""
    right: str = ""
    wrong: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def _of_gsm8k() -> dict[str, list[Any]]:
    rows = [gsm8k.row(GSM8K)] * 4
    return {"train.jsonl": rows, "eval.jsonl": rows}


def _of_sft_then_grpo() -> dict[str, list[Any]]:
    return {**_of_gsm8k(), "sft.jsonl": [sft_then_grpo.solution(GSM8K)] * 4}


def _of_dapo() -> dict[str, list[Any]]:
    other = {**DAPO, "prompt": [{"role": "user", "content": "What is 1100?"}]}
    rows = list(distinct([DAPO, DAPO, other, DAPO], dapo_math.question))
    assert len(rows) == 2
    return {"train.jsonl": rows, "eval.jsonl": rows}


def _of_countdown() -> dict[str, list[Any]]:
    rows = [countdown.row(COUNTDOWN)] * 4
    return {"train.jsonl": rows, "eval.jsonl": rows}


def _of_reasoning_gym() -> dict[str, list[Any]]:
    rows = [row for task in reasoning_gym.TASKS for row in reasoning_gym.rows(task, 2, seed=0)]
    return {"train.jsonl": rows, "eval.jsonl": rows}


_NUMBER = ("So it is \\boxed{1100}.", ("So it is \\boxed{110}.", ""))
_PENS = "200 pens and 100 books cost?"
CASES = {
    "gsm8k": Case("qwen2.5", _of_gsm8k, _PENS, *_NUMBER),
    "lora": Case("qwen2.5", _of_gsm8k, _PENS, *_NUMBER),
    "sft_then_grpo": Case("qwen2.5-base", _of_sft_then_grpo, _PENS, *_NUMBER),
    "distillation": Case("qwen3", _of_gsm8k, _PENS, *_NUMBER, ("algorithm.teacher.model=model",)),
    "moe": Case("qwen3-moe", _of_dapo, "What is 2^10 + 76?", *_NUMBER),
    "dapo_math": Case("qwen2.5-base", _of_dapo, "What is 2^10 + 76?", "2^10 = 1024.\nAnswer: 1100", ("Answer: 1024",)),
    "countdown": Case(
        "qwen2.5-base",
        _of_countdown,
        "[44, 19, 35], create an equation that equals 98",
        "Try <answer>44 + 19</answer>, no: <answer>44 + 19 + 35 = 98</answer>",
        ("44 + 19 + 35", "<answer>2 ** 99</answer>", "<answer>__import__('os')</answer>", "<answer>44 / 0</answer>"),
    ),
    "reasoning_gym": Case(
        "qwen3", _of_reasoning_gym, "between <answer> and </answer>.", "so <answer>{answer}</answer>", ("{answer}", "")
    ),
    "preference": Case("qwen2.5-base", lambda: preference.files([PAIR] * 12, [PAIR] * 4), "Say hello."),
    "tools": Case("", shown='"name": "multiply"'),
}
FILES = sorted(str(file.relative_to(ROOT / "recipes")) for file in (ROOT / "recipes").glob("*/*.yaml"))
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
_MIXTURE = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def write_model(folder: Path, family: str, kind: Any = AutoModelForCausalLM) -> None:
    """Write a tiny model with the chat template of a family, and its kind of tokenizer."""
    is_base = family.endswith("-base")  # its end token is not the one that ends a turn
    template = TEMPLATES["qwen2_5" if family.startswith("qwen2.5") else "qwen3"]
    tokenizer = byte_tokenizer(template, "<|endoftext|>" if is_base else "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *(["<|im_end|>"] if is_base else ())]})
    sizes = {**_SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config: Any
    if family == "qwen3-moe":
        config = Qwen3MoeConfig(**sizes, **_MIXTURE, head_dim=16, tie_word_embeddings=False)
    else:
        config = Qwen3Config(**sizes, head_dim=16) if family == "qwen3" else Qwen2Config(**sizes)
    if kind is AutoModelForSequenceClassification:
        config.num_labels, config.pad_token_id = 1, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(folder: Path, name: str) -> list[str]:
    """Make a recipe's folder with data and a model; return the overrides of its job file."""
    case = CASES[name]
    if name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed: pip install 'rlboost[reasoning-gym]'")
    new_folder.make(folder, recipe=name)
    for file, rows in case.make_data().items():
        write_rows(folder / file, rows)
    if not case.family:
        command = [sys.executable, "prepare.py"]
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        return []
    write_model(folder / "model", case.family)
    if name == "preference":
        write_model(folder / "reward-model", case.family, AutoModelForSequenceClassification)
    return ["model=model", *case.overrides]


def test_every_recipe_has_a_case() -> None:
    assert sorted(CASES) == new_folder.names()


@pytest.mark.parametrize("file", FILES)
def test_recipe_fits_a_model_of_its_family(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, job_file = file.partition("/")
    overrides = make(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    if name == "reasoning_gym" and job_file != "job.yaml":  # of the example's model, which has no chat template
        write_rows(Path("train.jsonl"), reasoning_gym.rows("spell_backward", 4, seed=0, text=True))
        shutil.copy("train.jsonl", "eval.jsonl")
        shutil.copytree(ROOT / "examples/sums/model", "model", dirs_exist_ok=True)
    if name == "tools":
        overrides = ["model=model"]
    elif job_file == "job.yaml":  # a character is a token here, and the rows are few
        overrides += ["data.max_prompt_tokens=4096", "eval.samples=2"]
    found = jobcheck.check(Path(job_file), overrides)
    assert found.problems == []
    assert list(found.warnings) == []
    is_text = name == "reasoning_gym" and job_file != "job.yaml"
    assert ("Spell this word backward" if is_text else CASES[name].shown) in found.example


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.right])
def test_reward_of_a_recipe_tells_right_from_wrong(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    spec = parse(load("job.yaml"))
    row = json.loads(Path("train.jsonl").read_text().splitlines()[0])
    prompt = row.pop(spec.data.prompt_key)
    case = CASES[name]
    texts = [text.format(**row) if name == "reasoning_gym" else text for text in (case.right, *case.wrong)]
    assert asyncio.run(_rewards(spec, prompt, texts, row)) == (1.0, *([0.0] * len(case.wrong)))


async def _rewards(spec: Any, prompt: Any, texts: list[str], columns: dict[str, Any]) -> tuple[float, ...]:
    pool = RewardPool(spec.reward.model_copy(update={"workers": 1, "timeout_s": 60}), Waits())
    await pool.start()
    n = len(texts)
    said: list[str | list[dict[str, Any]]] = [[{"role": "assistant", "content": text}] for text in texts]
    batch = RewardBatch([prompt] * n, said, [[1]] * n, {name: [value] * n for name, value in columns.items()})
    try:
        scores = await pool.score(batch)
    finally:
        await pool.close()
    assert scores.rewards is not None, scores
    return scores.rewards


needs_redis = pytest.mark.skipif(executable() is None and not os.environ.get("CI"), reason="no redis-server here")
SMALL = ("steps=2", "trainer.dtype=float32", "trainer.offload=none")


def run(folder: Path, *arguments: str, limit_s: float = 300) -> str:
    """Run a module with nothing of ours in the environment."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**ours, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_redis
def test_tools_trains_as_its_readme_says(tmp_path: Path) -> None:
    folder = tmp_path / "tools"
    make(folder, "tools")
    run(folder, "rlboost", "up", "--workers=1", "--reserved=0", "--detach")
    try:
        few = ("steps=2", "data.prompts_per_step=4", "eval.samples=8")
        run(folder, "rlboost", "run", "job.yaml", *few, "--follow")
        rows = metrics_of(folder)["tools"]
    finally:
        run(folder, "rlboost", "down")
    assert rows[0]["turns/mean"] > 1
    assert rows[0]["reward/mean"] > 0
    assert "eval/pass@1" in rows[-1]


def _letters(n: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield pairs of answers of letters: of the better one three of four are an `a`."""
    for _ in range(n):
        asked = {"role": "user", "content": rng.choice("xyz")}
        texts = ("".join(rng.choice(letters) for _ in range(8)) for letters in ("aaab", "abcdefgh"))
        better, worse = ([asked, {"role": "assistant", "content": text}] for text in texts)
        yield {"chosen": better, "rejected": worse}


@needs_redis
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_preference_raises_the_win_rate_in_three_iterations_of_one_command(tmp_path: Path) -> None:
    """SFT imitates the worse answers, so that the iterations have something to learn."""
    make(tmp_path, "preference")
    rng = random.Random(0)
    rows = list(_letters(768, rng))
    made = preference.files(rows, rows[:32])
    made["sft.jsonl"] = [{"messages": row["rejected"]} for row in rows[:256]]
    for file, of_file in made.items():
        write_rows(tmp_path / file, of_file)
    small: dict[str, Any] = {"dtype": "float32", "offload": "none", "activation_checkpointing": False}
    changes: dict[str, dict[str, Any]] = {
        "warmup": {"steps": 60, "optimizer": {"lr": 3e-3}},
        "reward_model": {"steps": 40, "optimizer": {"lr": 3e-3}},
        "job": {"sampling": {"max_tokens": 12}, "optimizer": {"lr": 5e-4}},
    }
    sizes = {"warmup": 16, "reward_model": 16, "job": 64}
    for name, change in changes.items():
        spec = {**load(str(tmp_path / f"{name}.yaml")), **change, "model": "model"}
        spec["data"] |= {"prompts_per_step": sizes[name], "max_prompt_tokens": 4096}
        spec["trainer"] |= {key: value for key, value in small.items() if key in spec["trainer"]}
        spec["trainer"]["deterministic"] = True  # whatever order the groups are complete in
        if name == "job":
            spec["algorithm"] |= {"updates_per_step": 8, "group_size": 4}
            spec["eval"]["samples"] = 128
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    run(tmp_path, "rlboost", "up", "--workers=1", "--reserved=0", "--detach")
    try:
        printed = run(tmp_path, "workflow", limit_s=900)
    finally:
        run(tmp_path, "rlboost", "down")
    rates = [float(rate) for rate in re.findall(r"win rate after iteration \d: (\S+)", printed)]
    found = metrics_of(tmp_path)
    assert found["preference-reward"][-1]["eval/accuracy"] > 0.9
    assert [row["step"] for row in found["preference"]] == [0, 1, 2, 3]
    assert 0.5 < rates[0] < rates[1] < rates[2], printed
    assert rates[2] > 0.7


def metrics_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the run log of each job by its name."""
    runs = (folder / ".rlboost/runs").iterdir()
    return {run.name.rpartition("-")[0]: _lines(run / "metrics.jsonl") for run in runs}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@needs_redis
def test_gsm8k_trains_by_make_gpu_and_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "build/recipes/gsm8k"
    make(folder, "gsm8k")
    command = ("benchmarks.gpu.recipe", "--whole", "gsm8k", "--gpus=", "--engine=torch", f"--model={folder / 'model'}")
    few = ("data.prompts_per_step=2", "sampling.max_tokens=16", "eval.samples=2", "data.max_prompt_tokens=4096")
    shown = json.loads(run(tmp_path, *command, *SMALL, *few).splitlines()[-1])
    assert shown["tokens_per_s"] > 0
    curve = folder / "curve.png"
    assert curve.read_bytes().startswith(b"\x89PNG")
    curve.unlink()
    run(tmp_path, *command, *SMALL, *few)
    assert curve.exists(), "a completed run is only drawn again"
    with pytest.raises(AssertionError, match="began with other values"):
        run(tmp_path, *command, *SMALL, *few, "steps=3")
    assert len(list((folder / ".rlboost/runs").iterdir())) == 1
