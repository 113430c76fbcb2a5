"""`rlboost report JOB`: the report of any job, from what the REST API retains of it."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlboost import client
from rlboost.cli import app
from rlboost.report.history import History, workers_over_time
from rlboost.report.job_page import SECTIONS, write
from rlboost.report.record import JobEvent
from tests.support.fake_rest import FakeRest, job, lines, ok, problem
from tests.support.synthetic_record import AUDIT, END_AT, JOB_AT, STEPS, job_events, row

ROWS = [{**row(step), "perf/tokens_per_s": 100.0 + step} for step in range(STEPS + 1)]
SFT = [{"step": step, "perplexity": 9.0 - step, "loss": 2.0, "time/step_s": 1.0} for step in range(3)]


def history(**changes: Any) -> History:
    times = {"started_at": "2027-01-15T08:00:11+00:00", "finished_at": "2027-01-15T08:01:16+00:00"}
    fields: dict[str, Any] = {
        "job": job("completed", STEPS, steps=STEPS, latest={"reward/mean": 0.5}, **times),
        "job_file": "name: j\n",
        "rows": ROWS,
        "events": job_events(),
        "audit": AUDIT,
        "seen_at": END_AT,
    }
    return History(**(fields | changes))


def test_the_report_of_a_job_has_its_curves_metrics_and_job_file(tmp_path: Path) -> None:
    page = write(history(), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)">', text) == [
        *("learning", "throughput", "steps", "warnings", "metrics", "counters", "settings")
    ]
    assert text.count("<svg") == len(SECTIONS)
    assert "name: j" in text
    assert "0:01:05" in text
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == [
        f"{section.name}.png" for section in sorted(SECTIONS)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"job": job("pending"), "rows": [], "events": [], "audit": {}},
        {"job": job("completed", 3, started_at="2027-01-15T08:00:11+00:00"), "rows": SFT, "events": [], "audit": {}},
        {"job": job("failed", 1, error="reward: <b>boom"), "rows": ROWS[:1]},
    ],
    ids=["nothing yet", "supervised", "failed"],
)
def test_a_job_of_any_kind_and_state_has_a_report(changes: dict[str, Any], tmp_path: Path) -> None:
    text = write(history(**changes), tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == len(SECTIONS)
    assert str(changes["job"]["state"]) in text
    assert "<b>boom" not in text


def test_warnings_of_the_job_are_escaped(tmp_path: Path) -> None:
    warning = JobEvent(at=JOB_AT, kind="warning", source="trainer", fields={"text": "<script>all equal"})
    text = write(history(events=[warning]), tmp_path).read_text(encoding="utf-8")
    assert "&lt;script&gt;all equal" in text


def test_workers_over_time_counts_joins_losses_and_those_there_before() -> None:
    counted = workers_over_time(job_events())
    assert counted[0][1:] == (1, 3)  # at the first event
    assert [spot for _, _, spot in counted[1:]] == [2, 3, 2, 3]  # lost, joined, left, joined
    assert workers_over_time([]) == []


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    monkeypatch.chdir(tmp_path)
    fake = FakeRest()
    monkeypatch.setattr(client, "Client", partial(client.Client, transport=fake))
    monkeypatch.setenv("RLBOOST_URL", "http://api.test")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    return fake


def report(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments])


def test_report_reads_a_job_by_name_and_does_not_wait_for_its_end(rest: FakeRest, tmp_path: Path) -> None:
    event = json.dumps({"at": JOB_AT, "source": "trainer", "fields": {"text": "all equal"}})
    rest.on("GET /v1/jobs/sums", problem(404, "No such job", "there is no job 'sums'"))
    rest.on("GET /v1/jobs", ok([job("running", 2, name="sums")]))
    rest.on("GET /v1/jobs/j-1/spec", ok({"name": "sums"}))
    rest.on("GET /v1/jobs/j-1/audit", ok(AUDIT))
    rest.on("GET /v1/jobs/j-1/metrics", ok(ROWS[:2]))
    rest.on("GET /v1/jobs/j-1/events", lines(["event: warning", f"data: {event}", ""]))
    result = report("sums", "--out", "out")
    assert result.exit_code == 0, result.stderr
    assert "all equal" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    [events] = [request for request in rest.requests if request.url.path.endswith("/events")]
    assert events.url.params["follow"] == "0"


def test_report_of_an_unknown_job_or_to_a_bad_folder_names_the_remedy(rest: FakeRest, tmp_path: Path) -> None:
    rest.on("GET /v1/jobs/nope", problem(404, "No such job", "there is no job 'nope': list them"))
    rest.on("GET /v1/jobs", ok([]))
    unknown = report("nope")
    assert (unknown.exit_code, "list them" in unknown.stderr) == (1, True)
    (tmp_path / "file").touch()
    rest.on("GET /v1/jobs/j-1", ok(job("running")))
    for part in ("spec", "audit"):
        rest.on(f"GET /v1/jobs/j-1/{part}", problem(409, "Job quarantined", "cannot be read"))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    rest.on("GET /v1/jobs/j-1/events", lines([]))
    refused = report("j-1", "--out", "file")
    assert (refused.exit_code, "--out file" in refused.stderr) == (2, True)
