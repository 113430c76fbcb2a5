"""`rlboost report JOB`: the report of any job, from what the REST API retains of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlboost import client
from rlboost import report as report_module
from rlboost.cli import app
from rlboost.report import samples_by_step
from tests.support.fake_rest import FakeRest, job, lines, ok, problem
from tests.support.report_data import data_of
from tests.support.synthetic_record import AUDIT, JOB_AT, row, sample


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    monkeypatch.chdir(tmp_path)
    fake = FakeRest()
    monkeypatch.setattr(client, "Client", partial(client.Client, transport=fake))
    monkeypatch.setenv("RLBOOST_URL", "http://api.test")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    event = json.dumps({"at": JOB_AT, "kind": "warning", "source": "trainer", "fields": {"text": "all equal"}})
    fake.on("GET /v1/jobs", ok([job("running", 2, name="sums")]))
    fake.on("GET /v1/jobs/j-1", ok(job("running", 2, name="sums")))
    fake.on("GET /v1/jobs/j-1/spec", ok({"name": "sums"}))
    fake.on("GET /v1/jobs/j-1/audit", ok(AUDIT))
    fake.on("GET /v1/jobs/j-1/cost", ok({"dollars": 1.5}))
    fake.on("GET /v1/jobs/j-1/metrics", ok([row(0), row(1)]))
    fake.on("GET /v1/jobs/j-1/samples", ok([sample("1", [("w-1", 2, 4)])]))
    fake.on("GET /v1/jobs/j-1/events", lines(["event: warning", f"data: {event}", ""]))
    fake.on("GET /v1/fleet", ok({"present": 0}))
    return fake


def report(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments])


def written(out: Path) -> Any:
    return data_of((out / "index.html").read_text(encoding="utf-8"))


def test_report_reads_a_job_by_name_and_does_not_wait_for_its_end(rest: FakeRest, tmp_path: Path) -> None:
    rest.on("GET /v1/jobs/sums", problem(404, "No such job", "there is no job 'sums'"))
    result = report("sums", "--out", "out")
    assert result.exit_code == 0, result.stderr
    data = written(tmp_path / "out")
    assert data["answers"]["jobs/j-1"]["name"] == "sums"
    assert data["answers"]["jobs/j-1/cost"] == {"dollars": 1.5}
    assert data["answers"]["jobs/j-1/spec"] == {"name": "sums"}
    assert data["tables"] == [{"title": "Warnings", "rows": [["all equal"]], "place": "checks"}]
    assert list(data["samples"]) == ["3"]
    [events] = [request for request in rest.requests if request.url.path.endswith("/events")]
    assert events.url.params["follow"] == "0"


def test_report_of_an_unknown_job_or_to_a_bad_folder_names_the_remedy(rest: FakeRest, tmp_path: Path) -> None:
    rest.on("GET /v1/jobs/nope", problem(404, "No such job", "there is no job 'nope': list them"))
    unknown = report("nope")
    assert (unknown.exit_code, "list them" in unknown.stderr) == (1, True)
    (tmp_path / "file").touch()
    refused = report("j-1", "--out", "file")
    assert (refused.exit_code, "--out file" in refused.stderr) == (2, True)


def test_report_of_a_job_whose_file_cannot_be_read_is_made_without_it(rest: FakeRest, tmp_path: Path) -> None:
    rest.on("GET /v1/jobs/j-1/spec", problem(409, "Unreadable job", "its record cannot be parsed"))
    result = report("j-1", "--out", "out")
    assert result.exit_code == 0, result.stderr
    assert written(tmp_path / "out")["answers"]["jobs/j-1/spec"] is None


def test_samples_of_the_newest_steps_fit_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sample(str(step), [("w-1", 0, 1)], step=step, prompt="", completion="x" * 10) for step in range(5)]
    monkeypatch.setattr(report_module, "MAX_SAMPLE_CHARACTERS", 3 * len(json.dumps(rows[0])))
    assert list(samples_by_step(rows)) == [3, 4, 5]
