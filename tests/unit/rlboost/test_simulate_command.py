"""`rlboost simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rlboost.simulation
from benchmarks import evaluation
from rlboost.cli import app
from rlboost.simulation import Machine, Policy, SimulatedJob, SimulationResult
from rlboost.simulation.result import ratio_text
from rlboost.simulation.traces import FleetTrace
from tests.support.simulated import simulated

TRACE = "0,add,node1\n0,add,node2\n60000,add,node3\n120000,remove,node1\n600000,add,node4\n"


@pytest.fixture
def small_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a small job in the place of the preset's: the command's own part stays the same."""

    def simulate(_: SimulatedJob, __: Machine, trace: FleetTrace, policy: Policy, *, seed: int) -> SimulationResult:
        return simulated(policy, trace=trace, seed=seed)

    monkeypatch.setattr(rlboost.simulation, "simulate", simulate)


def command(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", "--hours", "0.1", *arguments])


def row(result: Result, policy: str) -> list[str]:
    return next(line.split() for line in result.output.splitlines() if line.startswith(f"{policy} "))


@pytest.mark.usefixtures("small_job")
def test_simulate_command_compares_policies_with_the_first(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    result = command("--policy", "verl", "--policy", "rlboost", "--trace", str(trace), "--sample", "1")
    assert result.exit_code == 0, result.output
    assert row(result, "verl")[3] == "same"
    assert row(result, "rlboost")[3].endswith("x")
    assert float(row(result, "rlboost")[6]) > 1.5


@pytest.mark.usefixtures("small_job")
def test_simulate_command_prints_json() -> None:
    result = command("--policy", "paper", "--seeds", "1", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["trace_s"] == pytest.approx(360)
    assert printed["policies"][0]["policy"] == "paper"


@pytest.mark.parametrize(
    ("option", "value"), [("--policy", "best"), ("--model", "70b"), ("--completions", "none"), ("--start", "99")]
)
def test_simulate_command_rejects_unknown_values(option: str, value: str) -> None:
    result = command(option, value)
    assert result.exit_code == 2
    assert option in result.output
    assert value in result.output


def test_simulate_command_without_a_complete_step_is_an_error() -> None:
    result = command("--policy", "verl", "--seeds", "1")
    assert result.exit_code == 2
    assert "pass more --hours" in result.output


def test_table_of_the_evaluation_always_simulates_what_it_compares_with(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_names: list[str] = []

    def over_segments(_: object, names: Iterable[str]) -> list[evaluation.Row]:
        simulated_names.extend(names)
        return []

    monkeypatch.setattr(evaluation, "over_segments", over_segments)
    monkeypatch.setattr("sys.argv", ["evaluation", "table", "--policies", "paper"])
    evaluation.main()
    assert simulated_names == ["verl", "paper"]


def test_ratio_below_the_resolution_is_shown_as_the_same() -> None:
    assert [ratio_text(value) for value in (1.0, 1.029, 0.98, 1.05, 0.9)] == ["same"] * 3 + ["1.05x", "0.90x"]
