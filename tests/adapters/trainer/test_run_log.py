"""Metrics in the loggers of others, read back with their own readers; and loggers that fail or hang."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlboost.services.trainer.adapters import run_folder as folder
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder
from rlboost.services.trainer.adapters.run_log import RunLog, openers
from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.access import RecordKey
from tests.support import wandb_file
from tests.support.eventually import LIMIT_S, eventually
from tests.support.stopwatch import Stopwatch
from tests.support.trainer_rig import Rig, spec

ROWS = {step: {"loss": 1.0 / (step + 1), "reward/mean": float(step)} for step in range(6)}


def run(path: Path, job: Any, first: int, end: int) -> list[str]:
    """Log steps as one process of a trainer does, and return what went wrong."""
    run_folder = LocalRunFolder(path, path, RecordKey("secret"), openers(job, "job-1-ab12", path))
    run_folder.begin("{}", first)
    troubles = [trouble for step in range(first, end) for trouble in run_folder.log_step(step, ROWS[step])]
    return troubles + run_folder.close()


def test_tensorboard_has_each_retrained_step_once(tmp_path: Path) -> None:
    job = spec(log={"tensorboard": True})
    assert run(tmp_path, job, 0, 4) == []
    assert run(tmp_path, job, 2, 6) == []
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert shown.Tags()["scalars"] == ["loss", "reward/mean"]
    for name in ("loss", "reward/mean"):
        events = shown.Scalars(name)
        assert [event.step for event in events] == list(range(6))
        assert [event.value for event in events] == pytest.approx([ROWS[step][name] for step in range(6)])


def test_wandb_has_one_run_with_the_jobs_id_settings_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(folder, "_FINISH_LIMIT_S", LIMIT_S)
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


async def test_wandb_start_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    log = RunLog(openers(spec(log={"wandb": {"project": "p"}}), "job-1", tmp_path))
    log.begin(0)
    problems: list[str] = []

    async def reported() -> bool:
        problems.extend(log.new_problems())
        return bool(problems)

    await eventually(reported)
    assert problems[0].startswith("log.wandb: ")
    assert "No API key" in problems[0]
    log.close(5.0)


@pytest.mark.parametrize(
    ("section", "library"), [({"tensorboard": True}, "tensorboard"), ({"wandb": {"project": "p"}}, "wandb")]
)
def test_missing_logger_library_is_rejected_by_name(
    tmp_path: Path, section: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"log\.{library} needs {library}: .*'\.\[logs\]'"):
        openers(spec(log=section), "job-1", tmp_path)


def test_job_without_log_section_needs_no_library(tmp_path: Path) -> None:
    assert openers(spec(), "job-1", tmp_path) == {}


# --- loggers that fail or hang ----------------------------------------------------------------------------------------


class Hanging:
    """Blocks on every row until released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.got: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.got.append(step)
        self.released.wait()

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
    logger.released.set()


async def test_failing_logger_is_reported_once_and_others_continue(tmp_path: Path) -> None:
    broken, good = Broken(), Hanging()
    good.released.set()

    def never(step: int) -> Any:
        raise OSError(f"no network at {step}")

    log = RunLog({"broken": lambda _: broken, "never": never, "good": lambda _: good})
    log.begin(3)
    problems: list[str] = []

    async def both() -> bool:
        problems.extend(log.new_problems())
        return len(problems) == 2

    for step in (3, 4, 5):
        log.log(step, {})
    await eventually(both)
    assert sorted(problems) == [
        "log.broken: RuntimeError: no space left; the job continues, and metrics.jsonl has every row",
        "log.never: OSError: no network at 3; the job continues, and metrics.jsonl has every row",
    ]
    log.log(6, {})
    log.close(5.0)
    assert log.new_problems() == []
    assert good.got == [3, 4, 5, 6, -1]


async def test_hanging_logger_blocks_nothing(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging}, patience_s=0.0)
    log.begin(0)
    log.log(0, {})
    await eventually(lambda: hanging.got == [0])
    log.log(1, {})
    [problem] = log.new_problems()
    pattern = r"log\.slow: it has not answered for \d+ s; the job continues, and metrics\.jsonl has every row"
    assert re.fullmatch(pattern, problem)
    for step in range(5000):
        log.log(step, {})
    stopwatch = Stopwatch()
    log.close(0.05)
    assert stopwatch.read() < 2.0
    assert log.new_problems() == []


def test_logger_queue_is_bounded_and_dropped_rows_are_reported(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    for step in range(1100):
        log.log(step, {})
    [problem] = log.new_problems()
    assert problem.startswith("log.slow: its queue of 1024 rows is full")
    log.close(0.0)


def test_slow_logger_continues_after_close(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    log.log(0, {})
    log.close(0.05)
    [problem] = log.new_problems()
    assert "it has not sent all rows at the end of the job" in problem
    hanging.released.set()
    for thread in threading.enumerate():
        if thread.name == "log-slow":
            thread.join(5.0)
    assert hanging.got[-1] == -1


async def test_logger_problem_is_a_warning_event(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=2))
    rig.folder.troubles = {0: ["log.wandb: no network; the job continues, and metrics.jsonl has every row"]}
    assert (await rig.run()).state == "completed"
    texts = [fields["text"] for kind, fields in await rig.events() if kind == "warning"]
    assert texts == ["log.wandb: no network; the job continues, and metrics.jsonl has every row"]
