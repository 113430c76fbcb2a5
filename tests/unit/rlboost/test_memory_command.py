"""`rlboost memory --model`: which GPUs train and serve a model, before there is a job file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.gpu_fit import MODELS
from rlboost.cli import app
from rlboost.jobs.memory import GPUS, fit_of

QWEN3_4B = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


def memory(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["memory", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps(QWEN3_4B))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_memory_of_a_model_shows_what_trains_and_serves_it() -> None:
    code, shown, _ = memory("--model", "base")
    assert code == 0
    lines = shown.splitlines()
    assert lines[0] == "base: 4.02 billion parameters, 4.02 per token"
    names = [
        "all weights, 1 GPU",
        "all weights with Muon, 1 GPU",
        "all weights, each of 8 GPUs",
        "LoRA of rank 32, 1 GPU",
    ]
    assert [name for name in names if not any(line.startswith(name) for line in lines)] == []
    assert "worker with vLLM, samples of 4,096 tokens at a time:" in lines
    found = json.loads(memory("--model", "base", "--json")[1])
    assert found["parameters"] == MODELS["Qwen3-4B"].total
    assert list(found["samples"]) == list(found["samples_fp8"]) == list(GPUS)
    (row,) = (line.split() for line in lines if line.startswith("24 GB   "))
    assert row == ["24", "GB", str(found["samples"]["24 GB"]), str(found["samples_fp8"]["24 GB"])]


@pytest.mark.usefixtures("folder")
def test_larger_samples_more_gpus_and_offload_change_the_memory() -> None:
    short, long = (fit_of(QWEN3_4B, tokens) for tokens in (1024, 16_384))
    assert all(one.gib < other.gib for one, other in zip(short.variants, long.variants, strict=True))
    assert all(short.samples[name] > long.samples[name] > 0 for name in GPUS)
    # A byte of each parameter that is no embedding: 3.6 GB, of which the cache gets 0.85, at 147,456 bytes per token.
    saved = {name: short.samples_fp8[name] - n for name, n in short.samples.items()}
    assert set(saved.values()) <= {20, 21}, saved
    whole = {one.name: one for one in short.variants}
    by_gpus = [whole["all weights, 1 GPU"], *(whole[f"all weights, each of {n} GPUs"] for n in (2, 4, 8))]
    assert [one.gib for one in by_gpus] == sorted((one.gib for one in by_gpus), reverse=True)
    assert whole["all weights with Muon, 1 GPU"].gib < by_gpus[0].gib
    assert whole["LoRA of rank 32, 1 GPU"].gpu == "24 GB"
    for one in short.variants:
        assert one.generating_gib["none"] > one.generating_gib["optimizer"] > one.generating_gib["all"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a job file, or --model FOLDER or --model OWNER/NAME"),
        (["job.yaml", "--model", "base"], "give a job file, or --model FOLDER or --model OWNER/NAME"),
        (["--model", "bse"], "there is no folder bse, and it is no Hugging Face id: did you mean base?"),
        (["--model", "gpt"], "model type gpt2: its memory cannot be computed (known: llama, "),
    ],
)
def test_memory_of_no_known_model_is_refused(folder: Path, arguments: list[str], problem: str) -> None:
    (folder / "gpt").mkdir()
    (folder / "gpt/config.json").write_text('{"model_type": "gpt2"}')
    code, _, stderr = memory(*arguments)
    assert (code, stderr.startswith(f"rlboost: {problem}")) == (2, True), stderr


def test_configuration_of_a_hub_id_is_downloaded_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(*of: str) -> str:
        asked.append(of)
        if of[0] == "Qwen/none":
            raise OSError("no such repository\nmore")
        return str(folder / "base/config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert memory("--model", "Qwen/Qwen3-4B")[0] == 0
    assert asked == [("Qwen/Qwen3-4B", "config.json")]
    code, _, stderr = memory("--model", "Qwen/none")
    assert code == 2
    assert stderr.startswith("rlboost: Qwen/none: its config.json cannot be downloaded (no such repository): correct")
