"""Metrics in the loggers of others, read back with their own readers; and loggers that fail or hang."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlboost.services.trainer.adapters import run_folder as folder
from rlboost.services.trainer.adapters import tracker_child
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder
from rlboost.services.trainer.adapters.run_log import Row, RunLog, openers
from rlboost.services.trainer.ports.storage import LoggedSample, RunEnd
from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.access import RecordKey
from tests.support import tracker_stand_ins
from tests.support.eventually import LIMIT_S, eventually
from tests.support.stopwatch import Stopwatch
from tests.support.trainer_rig import Rig, spec

ROWS = {step: {"loss": 1.0 / (step + 1), "reward/mean": float(step), "eval/pass@1": 0.5} for step in range(6)}
STAND_INS = Path(tracker_stand_ins.__file__).parent
_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7
_FULL, _LAST = 1, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file: LevelDB's log format, of messages that wandb's own classes parse."""
    data, at, parts = file.read_bytes(), _FILE_HEADER_BYTES, []
    while at + 7 <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < 7:
            at += left
            continue
        _checksum, n_bytes, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + n_bytes])
        at += 7 + n_bytes
        if kind in {_FULL, _LAST}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def run(path: Path, job: Any, first: int, end: int, run_end: RunEnd = "completed") -> list[str]:
    """Log steps as one process of a trainer does, and return what went wrong."""
    run_folder = LocalRunFolder(path, path, RecordKey("secret"), openers(job, "job-1-ab12", path))
    run_folder.begin("{}", first)
    troubles: list[str] = []
    for step in range(first, end):
        samples = [LoggedSample(step, "1+1=", f"{step}", float(step))] if job.log.samples else []
        troubles += run_folder.log_step(step, ROWS[step], samples)
    return troubles + run_folder.close(run_end)


def test_tensorboard_has_each_retrained_step_once(tmp_path: Path) -> None:
    job = spec(log={"tensorboard": True})
    assert run(tmp_path, job, 0, 4) == []
    assert run(tmp_path, job, 2, 6) == []
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(shown.Tags()["scalars"]) == ["eval/pass@1", "loss", "reward/mean"]
    for name in ("loss", "reward/mean"):
        events = shown.Scalars(name)
        assert [event.step for event in events] == list(range(6))
        assert [event.value for event in events] == pytest.approx([ROWS[step][name] for step in range(6)])


def test_wandb_has_one_run_with_the_jobs_id_settings_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(folder, "_FINISH_LIMIT_S", LIMIT_S)
    job = spec(name="sums", log={"wandb": {"project": "maths", "group": "g", "tags": ["a", "b"]}, "samples": 1})
    assert run(tmp_path, job, 2, 6) == []
    assert run(tmp_path / "failed", job, 0, 1, "failed") == []
    assert run(tmp_path / "cancelled", job, 0, 1, "cancelled") == []
    codes = {
        folder: [record.exit.exit_code for record in wandb_records(file) if record.HasField("exit")]
        for folder in (".", "failed", "cancelled")
        for file in (tmp_path / folder).glob("wandb/offline-run-*/run-job-1-ab12.wandb")
    }
    assert codes == {".": [0], "failed": [1], "cancelled": [255]}
    [file] = tmp_path.glob("wandb/offline-run-*/run-job-1-ab12.wandb")
    begun = next(record.run for record in wandb_records(file) if record.HasField("run"))
    assert (begun.run_id, begun.project, begun.display_name) == ("job-1-ab12", "maths", "sums")
    assert (begun.run_group, list(begun.tags)) == ("g", ["a", "b"])
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["algorithm"]["group_size"] == 2
    assert _history(file) == {step: ROWS[step] for step in range(2, 6)}
    tables = [json.loads(table.read_text()) for table in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"] for table in tables) == [
        [[step, "1+1=", f"{step}", float(step)]] for step in range(2, 6)
    ]
    assert {tuple(table["columns"]) for table in tables} == {LoggedSample._fields} == {tracker_child.SAMPLE_COLUMNS}


def _history(file: Path) -> dict[int, dict[str, float]]:
    rows = {}
    for record in wandb_records(file):
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
    problem = await reported(log)
    assert problem.startswith("log.wandb: ")
    assert "No API key" in problem
    log.close(5.0, "completed")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file into which stand-ins of trackers write what they are given."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setenv("RECORD", str(tmp_path / "calls"))
    monkeypatch.setattr(folder, "_FINISH_LIMIT_S", LIMIT_S)
    return tmp_path / "calls"


def test_mlflow_run_is_continued_by_the_next_trainer(
    tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    job = spec(name="sums", log={"mlflow": {"experiment": "maths", "tags": {"team": "a"}}, "samples": 1})
    for first, end, run_end, status in (
        (0, 1, "failed", "FAILED"),
        (1, 2, "stopped", "KILLED"),
        (2, 4, "completed", "FINISHED"),
    ):
        assert run(tmp_path, job, first, end, cast("RunEnd", run_end)) == []
        assert [one["status"] for one in json.loads(record.read_text()).values()] == [status]
    [seen] = json.loads(record.read_text()).values()
    assert (seen["name"], seen["tags"]) == ("sums", {"team": "a", "rlboost.job": "job-1-ab12"})
    assert seen["params"]["algorithm.group_size"] == "2"
    assert [step for step, _ in seen["metrics"]] == [0, 1, 2, 3]
    assert seen["metrics"][0][1] == {"loss": 1.0, "reward/mean": 0.0, "eval/pass_at_1": 0.5}
    assert seen["tables"]["samples-0.json"]["completion"] == ["0", "1", "2", "3"]
    assert tuple(seen["tables"]["samples-0.json"]) == LoggedSample._fields


async def reported(log: RunLog) -> str:
    """Return the first problem."""
    problems: list[str] = []

    async def is_reported() -> bool:
        problems.extend(log.new_problems())
        return bool(problems)

    await eventually(is_reported)
    return problems[0]


@pytest.mark.usefixtures("record")
async def test_tracker_without_a_server_is_reported_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = spec(log={"mlflow": {"experiment": "maths"}})
    log = RunLog(openers(job, "job-1", tmp_path))
    log.begin(0)
    assert (await reported(log)).startswith("log.mlflow: MLFLOW_TRACKING_URI is not set in the trainer's environment")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:passw0rd@server")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    log = RunLog(openers(job, "job-1", tmp_path))
    log.begin(0)
    for step in range(3):  # the process may end before or after it has read the first
        log.log(Row(step, ROWS[step]))
    log.close(LIMIT_S, "completed")
    assert "RuntimeError: API request to http://***@server/log failed with ***; the job continues" in await reported(
        log
    )


def test_swanlab_gets_the_jobs_id_rows_and_samples(tmp_path: Path, record: Path) -> None:
    job = spec(name="sums", log={"swanlab": {"project": "maths", "tags": ["a"]}, "samples": 1})
    assert run(tmp_path, job, 0, 2) == []
    init, *logged, finish = map(json.loads, record.read_text().splitlines())
    assert init[1:] == [["maths", None, None, ["a"], "sums", "job-1-ab12", "swanlog", "allow"], job.steps]
    table = [list(LoggedSample._fields), [[0, "1+1=", "0", 0.0]]]
    assert logged[0] == ["log", 0, {**ROWS[0], "samples": table}]
    assert (len(logged), finish) == (2, ["finish", "success", None])
    for end, state in (("failed", ["crashed", "the job failed"]), ("cancelled", ["aborted", None])):
        assert run(tmp_path, job, 0, 1, cast("RunEnd", end)) == []
        assert json.loads(record.read_text().splitlines()[-1]) == ["finish", *state]


@pytest.mark.parametrize(
    ("section", "library", "extra"),
    [
        ({"tensorboard": True}, "tensorboard", "logs"),
        ({"wandb": {"project": "p"}}, "wandb", "logs"),
        ({"mlflow": {"experiment": "e"}}, "mlflow", "mlflow"),
        ({"swanlab": {"project": "p"}}, "swanlab", "swanlab"),
    ],
)
def test_missing_logger_library_is_rejected_by_name(
    tmp_path: Path, section: dict[str, Any], library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"log\.{library} needs {library}: .*'\.\[{extra}\]'"):
        openers(spec(log=section), "job-1", tmp_path)


def test_job_without_log_section_needs_no_library(tmp_path: Path) -> None:
    assert openers(spec(), "job-1", tmp_path) == {}


# --- loggers that fail or hang ----------------------------------------------------------------------------------------


class Hanging:
    """Blocks on every row until released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.got: list[int] = []

    def log(self, row: Row) -> None:
        self.got.append(row.step)
        self.released.wait()

    def close(self, end: RunEnd) -> None:
        del end
        self.got.append(-1)


class Broken:
    """Fails at its second row."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def log(self, row: Row) -> None:
        if self.got:
            raise RuntimeError("no space left\nat all")
        self.got.append(row.step)

    def close(self, end: RunEnd) -> None:
        raise AssertionError(f"it has failed already, before {end}")


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
        log.log(Row(step, {}))
    await eventually(both)
    assert sorted(problems) == [
        "log.broken: RuntimeError: no space left; the job continues, and metrics.jsonl has every row",
        "log.never: OSError: no network at 3; the job continues, and metrics.jsonl has every row",
    ]
    log.log(Row(6, {}))
    log.close(5.0, "completed")
    assert log.new_problems() == []
    assert good.got == [3, 4, 5, 6, -1]


async def test_hanging_logger_blocks_nothing(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging}, patience_s=0.0)
    log.begin(0)
    log.log(Row(0, {}))
    await eventually(lambda: hanging.got == [0])
    log.log(Row(1, {}))
    [problem] = log.new_problems()
    pattern = r"log\.slow: it has not answered for \d+ s; the job continues, and metrics\.jsonl has every row"
    assert re.fullmatch(pattern, problem)
    for step in range(5000):
        log.log(Row(step, {}))
    stopwatch = Stopwatch()
    log.close(0.05, "completed")
    assert stopwatch.read() < 2.0
    assert log.new_problems() == []


def test_logger_queue_is_bounded_and_dropped_rows_are_reported(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    for step in range(1100):
        log.log(Row(step, {}))
    [problem] = log.new_problems()
    assert problem.startswith("log.slow: its queue of 1024 rows is full")
    log.close(0.0, "completed")


def test_slow_logger_continues_after_close(hanging: Hanging) -> None:
    log = RunLog({"slow": lambda _: hanging})
    log.begin(0)
    log.log(Row(0, {}))
    log.close(0.05, "completed")
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
