"""Metrics in the loggers of others, read back with their own readers; and loggers that fail or hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer.adapters.log.folder import JobFolder
from services.trainer.adapters.log.run_log import RunLog
from services.trainer.adapters.log.sinks import openers
from shared.errors import ConfigError
from tests.support import wandb_file
from tests.support.eventually import eventually
from tests.support.stopwatch import Stopwatch
from tests.support.trainer_rig import Rig, spec

ROWS = {step: {"loss": 1.0 / (step + 1), "reward/mean": float(step)} for step in range(6)}


def run(folder: Path, job: Any, first: int, end: int) -> list[str]:
    """Log steps as one process of a trainer does, and return what went wrong."""
    run_folder = JobFolder(folder, folder, openers(job, "job-1-ab12", folder))
    run_folder.begin("{}", first)
    troubles = [trouble for step in range(first, end) for trouble in run_folder.log_step(step, ROWS[step])]
    return troubles + run_folder.close()


def test_tensorboard_shows_every_step_once_although_some_were_trained_again(tmp_path: Path) -> None:
    job = spec(log={"tensorboard": True})
    assert run(tmp_path, job, 0, 4) == []
    assert run(tmp_path, job, 2, 6) == []
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert shown.Tags()["scalars"] == ["loss", "reward/mean"]
    for name in ("loss", "reward/mean"):
        events = shown.Scalars(name)
        assert [event.step for event in events] == list(range(6))
        assert [event.value for event in events] == pytest.approx([ROWS[step][name] for step in range(6)])


def test_wandb_has_one_run_by_the_jobs_id_with_its_settings_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = spec(name="sums", log={"wandb": {"project": "maths", "group": "g", "tags": ["a", "b"]}})
    assert run(tmp_path, job, 2, 6) == []
    [file] = tmp_path.glob("wandb/offline-run-*/run-job-1-ab12.wandb")
    begun = next(record.run for record in wandb_file.records(file) if record.HasField("run"))
    assert (begun.run_id, begun.project, begun.display_name) == ("job-1-ab12", "maths", "sums")
    assert (begun.run_group, list(begun.tags)) == ("g", ["a", "b"])
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["algorithm"]["group_size"] == 2
    assert _history(file) == {step: ROWS[step] for step in range(2, 6)}


def _history(file: Path) -> dict[int, dict[str, float]]:
    rows = {}
    for record in wandb_file.records(file):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows[record.history.step.num] = {name: json.loads(items[name]) for name in ROWS[0]}
    return rows


async def test_what_wandb_says_when_it_cannot_begin_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    log = RunLog(openers(spec(log={"wandb": {"project": "p"}}), "job-1", tmp_path))
    log.begin(0)
    told: list[str] = []

    async def it_is_told() -> bool:
        told.extend(log.troubles())
        return bool(told)

    await eventually(it_is_told, within_s=60.0)
    assert told[0].startswith("log.wandb: ")
    assert "No API key" in told[0]
    log.close(5.0)


@pytest.mark.parametrize(
    ("section", "library"), [({"tensorboard": True}, "tensorboard"), ({"wandb": {"project": "p"}}, "wandb")]
)
def test_a_library_that_is_not_installed_is_named_before_anything_is_trained(
    tmp_path: Path, section: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runlog.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"log\.{library} needs {library}: .*rlboost\[logs\]"):
        openers(spec(log=section), "job-1", tmp_path)


def test_without_the_section_no_library_is_asked_for(tmp_path: Path) -> None:
    assert openers(spec(), "job-1", tmp_path) == {}


# --- loggers that fail or hang ----------------------------------------------------------------------------------------


class Hanging:
    """Takes a row and does not come back."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.got: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.got.append(step)
        self.let_go.wait()

    def close(self) -> None:
        self.got.append(-1)


class Broken:
    """Fails at its second row."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.got:
            raise RuntimeError("no space left\nat all")
        self.got.append(step)

    def close(self) -> None:
        raise AssertionError("it has failed already")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    logger = Hanging()
    yield logger
    logger.let_go.set()


async def test_a_logger_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    broken, good = Broken(), Hanging()
    good.let_go.set()

    def never(step: int) -> Any:
        raise OSError(f"no network at {step}")

    log = RunLog({"broken": lambda _: broken, "never": never, "good": lambda _: good})
    log.begin(3)
    told: list[str] = []

    async def both() -> bool:
        told.extend(log.troubles())
        return len(told) == 2

    for step in (3, 4, 5):
        log.log(step, {})
    await eventually(both)
    assert sorted(told) == [
        "log.broken: RuntimeError: no space left; the job goes on, and metrics.jsonl has every row",
        "log.never: OSError: no network at 3; the job goes on, and metrics.jsonl has every row",
    ]
    log.log(6, {})
    log.close(5.0)
    assert log.troubles() == []
    assert good.got == [3, 4, 5, 6, -1]


async def test_nobody_waits_for_a_logger_that_hangs(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging}, patience_s=0.0)
    log.begin(0)
    log.log(0, {})
    await eventually(lambda: hanging.got == [0])
    log.log(1, {})
    assert log.troubles() == ["log.slow: it has not answered for 0 s; the job goes on, and metrics.jsonl has every row"]
    for step in range(5000):
        log.log(step, {})
    stopwatch = Stopwatch()
    log.close(0.05)
    assert stopwatch.read() < 2.0
    assert log.troubles() == []


def test_what_waits_for_a_logger_is_bounded_and_what_is_left_out_is_told(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    for step in range(1100):
        log.log(step, {})
    [trouble] = log.troubles()
    assert trouble.startswith("log.slow: 1024 rows wait for it, so later ones are left out")
    log.close(0.0)


def test_a_logger_that_needs_longer_than_the_end_of_the_job_goes_on_behind_it(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    log.log(0, {})
    log.close(0.05)
    [trouble] = log.troubles()
    assert "it has not sent everything when the job ended; it goes on as long as the trainer runs" in trouble
    hanging.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "log-slow":
            thread.join(5.0)
    assert hanging.got[-1] == -1


async def test_people_hear_of_it_among_the_jobs_events(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=2))
    rig.folder.troubles = {0: ["log.wandb: no network; the job goes on, and metrics.jsonl has every row"]}
    async with rig.trainer():
        await rig.command("create")
        assert (await rig.ended()).state == "completed"
    told = [fields["text"] for kind, fields in await rig.events() if kind == "warning"]
    assert told == ["log.wandb: no network; the job goes on, and metrics.jsonl has every row"]
