"""A job file names data and models of the operator's folders only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.named_paths import check_named_paths, check_processes
from rlboost.services.trainer.settings import Settings
from rlboost.shared.data.rows import _require_remote_files
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import InvalidJob, JobSpec, parse
from tests.support.jobs import job_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job's folder with a running system in it, and secrets around."""
    monkeypatch.delenv("RLBOOST_TRAINER_FOLDERS")
    here = tmp_path / "here"
    for name in (
        "data/a.jsonl",
        ".rlboost/token",
        ".rlboost/lock",
        ".rlboost/runs/j/model/config.json",
        ".ssh/id.jsonl",
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("{}")
    for name in (".rlboost/redis", ".rlboost/logs", ".rlboost/countdown/base"):
        (here / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/secret.jsonl").write_text("{}")
    (here / "linked").symlink_to(tmp_path / "secret")
    monkeypatch.chdir(here)
    return here


def checked(settings: Settings | None = None, **changes: Any) -> None:
    settings = settings or Settings()
    check_named_paths(parse(job_file(**changes)), settings.dir, settings.job_folders)


def data(*names: str, **more: str) -> dict[str, Any]:
    return {"train": list(names), **more}


def test_other_models_lie_in_the_operators_folders_too(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.judge\.model: \.\./secret is not in the trainer's folder"):
        checked(models={"judge": {"model": "../secret"}})


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "owner/name", "data": data("owner/dataset")},
        {"model": ".rlboost/runs/j/model", "data": data(".")},
        {"model": ".rlboost/countdown/base"},
        {"data": data("data", "data/a.jsonl", "data/*.jsonl", "missing.jsonl")},
        {"data": data("linked/secret.jsonl")},
        {"trainer": {"checkpoints": "s3://bucket/x"}},
        {"trainer": {"checkpoints": "checkpoints", "resume": ".rlboost/runs/j"}},
    ],
)
def test_path_in_the_operators_folders_is_allowed(folder: Path, changes: dict[str, Any]) -> None:
    checked(**changes)
    absolute: dict[str, Any] = {}
    if "data" in changes:
        absolute = {"data": data(*(str(folder / name) for name in changes["data"]["train"]))}
    if "owner/dataset" not in str(changes):
        checked(**absolute)


@pytest.mark.parametrize("field", ["data.train", "data.eval", "model", "trainer.checkpoints", "trainer.resume"])
@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "../secret",
        "data/../../secret",
        "linked/../secret",
        "~",
        ".ssh",
        ".ssh/id.jsonl",
        ".rlboost",
        ".rlboost/token",
        ".rlboost/runs/../token",
        ".rlboost/redis",
        ".rlboost/logs/a.log",
        "/proc/self/environ",
    ],
)
def test_other_path_needs_the_operators_setting(folder: Path, field: str, path: str) -> None:
    section, _, key = field.partition(".")
    given: Any = [path] if section == "data" else path
    changes = {section: {"train": "a/b", key: given} if section == "data" else {key: given}} if key else {field: path}
    with pytest.raises(ConfigError, match=f"^{field}: .*RLBOOST_TRAINER_FOLDERS="):
        checked(**changes)
    checked(Settings(folders=f"{folder.parent}:/"), **changes)


@pytest.mark.parametrize("pattern", ["../secret/*.jsonl", "/etc/*", ".ssh/*.jsonl", "*/../../secret/*.jsonl", "/*/*"])
def test_pattern_that_leads_elsewhere_needs_the_setting(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="RLBOOST_TRAINER_FOLDERS="):
        checked(data=data(pattern))


def test_visible_state_folder_is_protected(folder: Path) -> None:
    (folder / ".rlboost").rename(folder / "state")
    with pytest.raises(ConfigError, match="RLBOOST_TRAINER_FOLDERS="):
        checked(Settings(dir=Path("state/runs")), data=data("state/token"))
    with pytest.raises(ConfigError, match="RLBOOST_TRAINER_FOLDERS="):
        checked(Settings(dir=Path("state/runs")), data=data("."))
    checked(Settings(dir=Path("state/runs")), model="state/runs/j/model")


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd", "zip://a::/etc/a.zip"])
def test_remote_dataset_that_names_local_files_is_refused(name: str) -> None:
    _require_remote_files({"train": ["hf://datasets/a/b/c.parquet", "zip://x::hf://datasets/a/b/c.zip"]})
    with pytest.raises(ValueError, match="a file of this machine"):
        _require_remote_files({"train": [name]})


@pytest.mark.parametrize("section", ["reward", "environment"])
def test_more_processes_than_the_machine_is_meant_for_are_refused(section: str) -> None:
    def job(n: int) -> JobSpec:
        return parse(job_file(**{section: {"function": "m:f", "workers": n}}))

    for n_cpus, most in ((1, 64), (16, 256)):
        check_processes(job(most), n_cpus)
        with pytest.raises(ConfigError, match=f"^{section}.workers: {most + 1} processes are too many .* give {most} "):
            check_processes(job(most + 1), n_cpus)
    with pytest.raises(InvalidJob, match=f"^{section}.workers: should be 4096 or less"):
        job(10**9)
