"""The planner predicts time and dollars of fleets from what a run measured, and chooses one within limits."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.planning import Plan, Spread, best, plans, read_profile, simulated_machine
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.spec import RlJob, parse
from rlboost.shared.prices import Prices, read_prices
from rlboost.simulation.traces import FleetEvent, FleetTrace
from tests.support.builders import engine_profile

JOB = {
    "model": "m",
    "data": {"train": "t.jsonl", "prompts_per_step": 4},
    "reward": {"function": "f:reward"},
    "algorithm": {"group_size": 4},
    "sampling": {"max_tokens": 128},
    "steps": 6,
}
ENGINE = engine_profile("spot")
PROFILE = RunProfile(
    steps=5,
    step_s=3.0,
    engines=(ENGINE, engine_profile("own", role="reserved", price_per_hour=4.0)),
    prompt_tokens=(8, 16),
    completion_quantiles=((0.0, 10.0), (0.5, 40.0), (1.0, 128.0)),
    train_s_per_token=0.001,
    update_s=0.2,
)
ALONE = PROFILE.model_copy(update={"engines": (ENGINE,)})
"""Of a run without reserved engines."""
ALWAYS = FleetTrace.constant(3, 36_000.0)


def job(**fields: object) -> RlJob:
    spec = parse(JOB | fields)
    assert isinstance(spec, RlJob)
    return spec


def plans_of(
    profile: RunProfile = PROFILE,
    prices: Prices | None = None,
    *,
    spec: RlJob | None = None,
    trace: FleetTrace = ALWAYS,
    max_workers: int = 1,
    seeds: int = 1,
) -> list[Plan]:
    spec, prices = spec or job(), prices or Prices()
    return list(plans(spec, profile, prices, lambda _: trace, max_workers=max_workers, seeds=seeds, startup_s=1.0))


# --- prediction -------------------------------------------------------------------------------------------------------


def test_larger_fleet_is_faster_and_its_price_is_of_all_machines() -> None:
    found = plans_of(max_workers=2, seeds=2)
    assert [plan.max_workers for plan in found] == [0, 1, 2]
    hours = [plan.hours.mean for plan in found]
    assert hours == sorted(hours, reverse=True)
    for plan in found:
        per_hour = 4.0 + plan.max_workers * 1.0
        assert plan.dollars.mean == pytest.approx(plan.hours.mean * per_hour)
        assert plan.hours.lowest <= plan.hours.mean <= plan.hours.highest


def test_engines_generate_during_a_download_of_weights_and_not_in_the_pause() -> None:
    hours = []
    for update_pause_s in (0.1, 2.0, 0.0):
        engine = engine_profile("spot", update_s=2.0, update_pause_s=update_pause_s)
        profile = PROFILE.model_copy(update={"engines": (engine,)})
        hours.append(plans_of(profile, Prices(reserved=0.0), spec=job(elastic={"max_staleness": 1}))[0].hours.mean)
    assert hours[0] < 0.95 * hours[1]
    assert hours[2] == hours[1], "a profile without the pause"


def test_step_is_longer_where_scoring_takes_long() -> None:
    slow = PROFILE.model_copy(update={"reward_s": 1.0})
    (plan,), (slow_plan,) = (plans_of(profile, max_workers=0) for profile in (PROFILE, slow))
    assert slow_plan.hours.mean > plan.hours.mean


def test_prediction_repeats() -> None:
    assert plans_of(max_workers=1) == plans_of(max_workers=1)


def test_given_prices_replace_those_of_the_run() -> None:
    prices = Prices(reserved=10.0, workers={"spot": 2.0})
    found = plans_of(prices=prices, max_workers=1)
    assert found[1].dollars.mean == pytest.approx(found[1].hours.mean * 12.0)


def test_run_without_reserved_engines_is_planned_from_one_worker() -> None:
    found = plans_of(ALONE, Prices(reserved=3.0), max_workers=1)
    assert [plan.max_workers for plan in found] == [1]


def test_plan_without_reserved_engines_begins_when_an_instance_is_available() -> None:
    late = FleetTrace((FleetEvent(35_000.0, "add", "a"),), 36_000.0)
    found = plans_of(ALONE, Prices(reserved=3.0), trace=late, max_workers=1, seeds=2)
    assert found[0].workers.lowest == pytest.approx(1.0)


def test_plan_without_any_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no instance is available in the trace"):
        plans_of(ALONE, Prices(reserved=3.0), trace=FleetTrace.constant(0, 36_000.0))


def test_step_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.simulation.run.MAX_STEP_S", 60.0)
    gone = FleetTrace((FleetEvent(0.0, "add", "a"), FleetEvent(1.0, "remove", "a")), 360_000.0)
    with pytest.raises(ConfigError, match=r"does not end: .* use a smaller job, or a --trace with more instances"):
        plans_of(ALONE, Prices(reserved=3.0), trace=gone)


def test_job_of_longer_steps_than_the_measured_one_is_planned() -> None:
    larger = job(data={"train": "t.jsonl", "prompts_per_step": 16}, steps=1)
    short = PROFILE.model_copy(update={"step_s": 0.1})
    found = plans_of(short, spec=larger, max_workers=1)
    assert [plan.max_workers for plan in found] == [0, 1]


def test_trace_shorter_than_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a longer --trace"):
        plans_of(trace=FleetTrace.constant(3, 0.5))


def test_missing_price_is_refused() -> None:
    free = engine_profile("spot", price_per_hour=0.0)
    with pytest.raises(ConfigError, match="the price of workers of kind 'spot' is missing"):
        simulated_machine(free, PROFILE, Prices(), startup_s=0.0)
    with pytest.raises(ConfigError, match="the price of the reserved cluster is missing"):
        simulated_machine(ENGINE, ALONE, Prices(), startup_s=0.0)


def test_profile_without_a_preemptible_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="no throughput of a spot worker"):
        plans_of(PROFILE.model_copy(update={"engines": PROFILE.engines[1:]}))


# --- choice -----------------------------------------------------------------------------------------------------------


def plan_of(hours: float, dollars: float, most_dollars: float) -> Plan:
    one = Spread.of([1.0])
    return Plan("spot", 1, one, Spread.of([hours]), Spread(dollars, dollars, most_dollars), one)


SLOW, FAST, FASTEST = plan_of(9.0, 10.0, 11.0), plan_of(5.0, 12.0, 14.0), plan_of(4.0, 20.0, 25.0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, SLOW),
        ({"max_hours": 6.0}, FAST),
        ({"max_dollars": 30.0}, FASTEST),
        ({"max_dollars": 14.0}, FAST),
        ({"max_dollars": 13.0}, SLOW),
        ({"max_hours": 4.5, "max_dollars": 20.0}, None),
    ],
)
def test_best_plan_is_within_the_limits_for_every_seed(limits: dict[str, float], expected: Plan | None) -> None:
    assert best([SLOW, FAST, FASTEST], **limits) is expected


# --- command and files ------------------------------------------------------------------------------------------------


def test_plan_command_prints_each_fleet_and_marks_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "profile.json").write_text(PROFILE.model_dump_json())
    (tmp_path / "trace.csv").write_text("0,add,a\n3600000,add,b\n")
    arguments = ["plan", str(tmp_path / "job.yaml"), "--profile", str(tmp_path / "profile.json")]
    arguments += ["--trace", str(tmp_path / "trace.csv"), "--max-workers", "1", "--seeds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["max_workers"] for one in found] == [0, 1]
    assert sum(one["chosen"] for one in found) == 1
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE.model_dump(mode="json") | {"of_later": 1}))
    table = CliRunner().invoke(app, [*arguments, "--max-dollars", "0.000001"])
    assert table.exit_code == 2
    assert "warning: written by a newer release; ignored: of_later" in table.stderr
    assert "workers up to" in table.stdout
    assert "no fleet is within the limits" in table.stderr


def test_shipped_prices_are_a_dated_price_list() -> None:
    prices = read_prices(Path(str(files("rlboost.simulation") / "prices.yaml")))
    assert prices.as_of
    assert prices.source
    assert prices.reserved == 83.79


@pytest.mark.parametrize("moment", ["2026", "2026-10", "2026-10-01"])
def test_price_list_is_dated_in_any_form(tmp_path: Path, moment: str) -> None:
    (tmp_path / "prices.yaml").write_text(f"as_of: {moment}\n", encoding="utf-8")
    assert str(read_prices(tmp_path / "prices.yaml").as_of) == moment


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reserved: 1\nworkers: {a: 1\n", "line 3"),
        ("workers: {a: -1}", "workers.a"),
        ("workers: {a: .inf}", "workers.a"),
        ("reserverd: 1", "reserverd"),
        ("", "the file"),
        ("reserved: 1\nreserved: 2", "'reserved' is given twice"),
        ("a: \x00", "does not parse"),
        ("a: \xe9", "in UTF-8"),
    ],
)
def test_damaged_price_list_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "prices.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=problem):
        read_prices(tmp_path / "prices.yaml")


def test_damaged_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name the profile\.json of a run"):
        read_profile(tmp_path / "profile.json")
    (tmp_path / "profile.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="is not the profile of a run: format"):
        read_profile(tmp_path / "profile.json")
