"""`rlboost init`, and the job folder that it makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.jobs import check as jobcheck
from rlboost.jobs import new_folder
from rlboost.jobs.model_check import DataFindings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import load

ROOT = Path(__file__).parents[3]
SUMS = ROOT / "examples/sums"
JOB_FILES = ("job.yaml", "warmup.yaml")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # It tokenizes, with a real model: tests/e2e/test_command_line.py runs both jobs.
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())
    return tmp_path


def rlboost(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_init_new_folder_passes_config_check(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cd my-sums\n" in rlboost("init", "my-sums")
    monkeypatch.chdir(here / "my-sums")
    for job in JOB_FILES:
        found = jobcheck.check(Path(job), [])
        assert (found.problems, list(found.advice)) == ([], [])


def test_init_current_folder_with_hidden_entries_succeeds(here: Path) -> None:
    (here / ".git").mkdir()
    assert set(json.loads(rlboost("init", "--json"))["made"]) >= {"job.yaml", "reward.py", "train.jsonl", "model"}


def test_init_folder_with_job_refuses_and_keeps_it(here: Path) -> None:
    rlboost("init", "sums")
    (here / "sums/reward.py").write_text("mine")
    before = content(here)
    refused = rlboost("init", "sums", code=2)
    assert "reward.py" in refused
    assert "train.jsonl" in refused
    assert content(here) == before


def test_init_folder_with_other_files_refuses_and_names_them(here: Path) -> None:
    (here / "thesis.tex").touch()
    assert "thesis.tex" in rlboost("init", code=2)
    assert [path.name for path in here.iterdir()] == ["thesis.tex"]


def test_init_path_of_a_file_is_refused(here: Path) -> None:
    (here / "sums").touch()
    assert "sums is a file" in rlboost("init", "sums", code=2)


def test_init_folder_in_a_file_is_refused(here: Path) -> None:
    (here / "file").touch()
    assert "name another folder" in rlboost("init", "file/sums", code=2)


def test_init_hub_id_fills_job_files_with_rates_for_it(here: Path) -> None:
    rlboost("init", "sums", "--model", "Qwen/Qwen3-0.6B")
    assert not (here / "sums/model").exists()
    for name in JOB_FILES:
        spec = job_spec.parse(load(f"sums/{name}"))
        assert spec.model == "Qwen/Qwen3-0.6B"
        assert spec.optimizer.name == "adamw"
        assert spec.optimizer.lr <= 1e-5
        assert "dtype: bfloat16" in (here / "sums" / name).read_text()


def test_init_model_folder_is_absolute_in_job_files(here: Path) -> None:
    (here / "my: base #1").mkdir()
    new_folder.make(Path("sums"), "my: base #1")
    assert load("sums/job.yaml")["model"] == str(here / "my: base #1")


def test_init_unknown_model_creates_nothing(here: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        new_folder.make(Path("sums"), "no-such-folder")
    assert list(here.iterdir()) == []


def test_init_reward_test_passes_in_its_folder(here: Path) -> None:
    new_folder.make(Path("sums"))
    done = subprocess.run([sys.executable, "test_reward.py"], cwd=here / "sums", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (here / "sums/reward.py").read_text()
    (here / "sums/reward.py").write_text(text.replace("== str(right)", "!= str(right)"))
    done = subprocess.run([sys.executable, "test_reward.py"], cwd=here / "sums", capture_output=True, check=False)
    assert done.returncode != 0


def test_init_held_out_problems_are_not_trained_on(here: Path) -> None:
    new_folder.make(here)
    prompts = {
        name: [json.loads(line)["prompt"] for line in (here / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval", "warmup")
    }
    assert len(prompts["eval"]) == len(set(prompts["eval"]))
    assert set(prompts["eval"]).isdisjoint(prompts["train"] + prompts["warmup"])


@pytest.mark.parametrize("name", new_folder.names())
def test_init_recipe_has_its_files_and_no_data(name: str, here: Path) -> None:
    rlboost("init", "job", "--recipe", name.replace("_", "-"))
    made = {path.name for path in (here / "job").iterdir()}
    assert {"README.md", "job.yaml"} <= made
    assert not made & {"__init__.py", "__pycache__", "make_model.py", "train.jsonl", "warmup.jsonl"}
    assert job_spec.parse(load("job/job.yaml")).steps > 0
    named = re.findall(r"\(`([^`]+)` of RLBoost\)", (here / "job/README.md").read_text())
    assert all((ROOT / path).exists() for path in named)
    assert "](../" not in (here / "job/README.md").read_text()


def test_init_unknown_recipe_names_those_that_exist(here: Path) -> None:
    shown = rlboost("init", "job", "--recipe", "gsm", code=2)
    assert all(name in shown for name in new_folder.names())
    assert list(here.iterdir()) == []


def test_init_recipe_with_a_model_keeps_the_rate_of_a_large_one_only(here: Path) -> None:
    rlboost("init", "lora", "--recipe", "lora", "--model", "Qwen/Qwen3-1.7B")
    rlboost("init", "tools", "--recipe", "tools", "--model", "Qwen/Qwen3-0.6B")
    large, small = (job_spec.parse(load(f"{name}/job.yaml")) for name in ("lora", "tools"))
    assert (large.model, large.optimizer.lr) == ("Qwen/Qwen3-1.7B", 2e-5)
    assert (small.model, small.optimizer.lr) == ("Qwen/Qwen3-0.6B", 1e-6)
    assert not (here / "tools/model").exists()


def test_init_recipe_leaves_its_jobs_for_a_small_model_and_starts_as_its_readme_says(here: Path) -> None:
    shown = rlboost("init", "gym", "--recipe", "reasoning_gym", "--model", "Qwen/Qwen3-1.7B")
    assert load("gym/job.yaml")["model"] == "Qwen/Qwen3-1.7B"
    assert (load("gym/warmup.yaml")["model"], load("gym/warmup.yaml")["optimizer"]["lr"]) == ("model", 3e-3)
    assert "  rlboost up --gpus 0 --detach\n" in shown


@pytest.mark.parametrize(("package", "folder"), [("examples.sums", SUMS), ("recipes", ROOT / "recipes")])
def test_init_template_is_package_data(package: str, folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"][f"rlboost.{package}"]
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    others = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert any(name.endswith("model/model.safetensors") for name in others)
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_job_of_a_subfolder_passes_with_names_from_the_folder_of_the_system() -> None:
    rlboost("init", "jobs")
    there = {
        "model": "jobs/model",
        "data.train": "jobs/train.jsonl",
        "data.eval": "jobs/eval.jsonl",
        "reward.function": "jobs.reward:score",
    }
    found = jobcheck.check(Path("jobs/job.yaml"), [f"{key}={name}" for key, name in there.items()])
    assert found.problems == []


def test_config_check_from_another_folder_names_the_cd_to_run() -> None:
    rlboost("init", "sums")
    found = rlboost("config", "check", "sums/job.yaml", code=2)
    assert "run 'cd sums' first" in found
    assert "such as sums/train.jsonl and sums.reward:score" in found
    assert "optimizer.lr" not in found  # of a model that is not found, the size is not known
    Path("sums/job.yaml").rename("job.yaml")
    assert "first" not in rlboost("config", "check", "job.yaml", code=2)
