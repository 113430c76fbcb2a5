from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from rlboost import report
from rlboost.cli import app
from rlboost.commands import system as command
from rlboost.demo import run
from rlboost.demo import run as running
from rlboost.demo.run import GOAL, countdown
from rlboost.local.state import StateDir
from rlboost.report import Record
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import RlJob, parse
from tests.support.synthetic_record import AUDIT, record

ROOT = Path(__file__).parents[3]


def test_the_full_job_is_the_example_as_its_file_describes_it() -> None:
    job, goal = countdown(None, seed=3)
    spec = parse(job)
    assert (spec.steps, spec.trainer.seed, goal) == (60, 3, GOAL)
    assert isinstance(spec, RlJob)
    assert spec.eval is not None
    assert spec.eval.every == 10
    for path in (spec.model, str(spec.data.train), str(spec.data.eval)):
        assert Path(path).is_relative_to(ROOT)
        assert Path(path).exists()


def test_a_short_job_is_the_beginning_of_the_full_one() -> None:
    full, short = countdown(None, seed=0)[0], countdown(8, seed=0)[0]
    assert countdown(8, seed=0)[1] is None
    slope = full["optimizer"]["decay"] / full["steps"]
    assert short["optimizer"]["decay"] / short["steps"] == pytest.approx(slope)
    assert short["eval"]["every"] == 4
    assert {key for key in full if full[key] != short[key]} == {"steps", "eval", "optimizer"}


def test_autoscaled_demo_learns_the_number_of_workers_and_plans_no_joins(tmp_path: Path) -> None:
    demo = running.Demo(running.DemoOptions(tmp_path, steps=60, workers=1, autoscale=4), Console())
    assert {change.action for change in demo.record.planned} == {"kill", "notice"}
    assert demo._job["elastic"]["seeding"] == "auto"


def test_clear_removes_the_files_of_an_earlier_demo(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "demo")
    run.clear(state)
    (state.path / "redis").mkdir()
    run.clear(state)
    assert not (state.path / "redis").exists()


def test_demo_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty and not a demo's state: name another folder with --state"):
        run.clear(StateDir(tmp_path))
    assert (tmp_path / "mine").exists()


def test_a_folder_with_a_running_system_is_left_alone(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "demo")
    run.clear(state)
    with state.owned(), pytest.raises(ConfigError, match="already runs"):
        run.clear(state)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command with the outcome of a run in the run's place."""
    asked: list[running.DemoOptions] = []

    def invoke(outcome: Record | None, *arguments: str) -> tuple[Result, list[running.DemoOptions]]:
        def run(options: running.DemoOptions, _console: object) -> Record | None:
            asked.append(options)
            return outcome

        def write(_record: Record, out: Path) -> Path:
            out.mkdir(parents=True)
            (out / "index.html").touch()
            return out / "index.html"

        monkeypatch.setattr(running, "run", run)
        monkeypatch.setattr(report, "write", write)
        monkeypatch.setattr(command, "require_packages", lambda *_: None)
        return CliRunner().invoke(app, ["demo", "--state", str(tmp_path), *arguments]), asked

    return invoke


def test_successful_demo_prints_the_path_of_its_report(demo: Any, tmp_path: Path) -> None:
    result, asked = demo(record(), "--steps", "8", "--workers", "2", "--no-chaos", "--seed", "4")
    assert result.exit_code == 0, result.output
    assert asked == [running.DemoOptions(tmp_path, steps=8, workers=2, chaos=False, seed=4)]
    assert f"report: {tmp_path / 'report/index.html'}" in result.stdout
    assert (tmp_path / "report/index.html").exists()


def test_demo_replays_hours_of_a_trace_with_at_most_as_many_workers(demo: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n0,add,c\n3600000,remove,a\n7200000,remove,b\n9000000,add,d\n")
    result, asked = demo(record(), "--trace", str(trace), "--start", "1", "--hours", "1", "--workers", "1")
    assert result.exit_code == 0, result.output
    replayed = asked[0].trace
    assert replayed is not None
    assert (replayed.duration_s, [event.instance for event in replayed.events]) == (3600.0, ["b"])


@pytest.mark.parametrize("other", ["--no-chaos", "--autoscale=2"])
def test_trace_excludes_other_changes_of_the_fleet(demo: Any, tmp_path: Path, other: str) -> None:
    result, asked = demo(record(), "--trace", str(tmp_path / "trace.csv"), other)
    assert (result.exit_code, asked) == (2, [])
    assert "--trace says when workers join and are killed" in result.stderr


def test_demo_starts_no_more_workers_than_autoscaling_may_run(demo: Any) -> None:
    _, asked = demo(record(), "--autoscale", "2")
    result, _ = demo(record(), "--autoscale", "2", "--workers", "3")
    assert [options.workers for options in asked] == [2]
    assert result.exit_code == 2
    assert "--workers 3 is more than --autoscale 2" in result.stderr


def test_a_violated_guarantee_fails_the_command_not_the_report(demo: Any, tmp_path: Path) -> None:
    result, _ = demo(record(audit=AUDIT | {"delivered": 1}), "--out", str(tmp_path / "elsewhere"))
    assert result.exit_code == 1
    assert "a guarantee was violated" in result.stderr
    assert (tmp_path / "elsewhere/index.html").exists()


def test_demo_as_json_prints_nothing_else_on_standard_output(demo: Any, tmp_path: Path) -> None:
    result, _ = demo(record(audit=AUDIT | {"delivered": 1}), "--json")
    printed = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (printed["job"]["state"], printed["audit"]["delivered"]) == ("completed", 1)
    assert [one["guarantee"] for one in printed["guarantees"] if not one["held"]] == [
        "Every sample was delivered, or dropped for a stated reason"
    ]
    assert printed["report"] == str(tmp_path / "report/index.html")


def test_a_run_that_was_stopped_has_no_report(demo: Any, tmp_path: Path) -> None:
    result, _ = demo(None)
    assert result.exit_code == 130
    assert "the demo was stopped; nothing of it runs any more" in result.stderr
    assert not (tmp_path / "report").exists()
