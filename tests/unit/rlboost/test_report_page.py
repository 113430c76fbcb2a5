"""Reports are the web page with a job's data in it: one file that refers to nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.demo.summary import Recorder
from rlboost.report import Record, render, report_of, write
from rlboost.shared.page import STATIC
from tests.support.report_data import data_of
from tests.support.synthetic_record import record, sample, unfinished


def test_report_has_every_part_of_the_page_and_the_answers() -> None:
    html = render(report_of(record()))
    for name in ("main.js", "history.js", "api.js", "style.css"):
        last_line = (STATIC / name).read_text(encoding="utf-8").strip().splitlines()[-1]
        assert last_line.removeprefix("export ") in html, name
    data = data_of(html)
    assert data["answers"]["jobs/countdown-abc/audit"]["delivered"] == 3276
    assert len(data["answers"]["jobs/countdown-abc/metrics"]) == 13
    assert data["samples"]["3"][0]["spans"][0][0] == "worker-2-aaaa"
    assert [table["title"] for table in data["tables"]] == ["Guarantees", "Processor time", "This run"]
    assert data["text"].startswith("Every guarantee held. 12 steps of GRPO")


def test_report_refers_to_nothing_outside_and_imports_no_module() -> None:
    html = render(report_of(record()))
    assert not re.search(r"""(?:src|href)="(?!#|data:)""", html)
    assert not re.search(r"url\(", html)
    assert not re.search(r"^(import|export) ", html, re.MULTILINE)
    assert html.count("</script>") == 2


def test_kills_and_starts_of_workers_are_events_of_the_report() -> None:
    events = data_of(render(report_of(record())))["events"]
    added = [(event["kind"], event["fields"]["worker"]) for event in events if event["source"] == "demo"]
    assert added == [
        ("worker_killed", "worker-2-aaaa"),
        ("worker_started", "worker-4-aaaa"),
        ("worker_started", "worker-5-aaaa"),
    ]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)


def quiet() -> Record:
    made = record(changes=[], planned=[], samples={})
    made.settings.chaos = False
    return made


@pytest.mark.parametrize("made", [unfinished(), quiet()], ids=["unfinished", "quiet"])
def test_a_run_with_little_to_show_has_a_report_too(made: Record) -> None:
    text = data_of(render(report_of(made)))["text"]
    assert text.startswith("Some guarantees were violated" if not made.steps else "Every guarantee held")


def test_report_escapes_foreign_text() -> None:
    spans = [("worker-1-aaaa", 2, 1)]
    made = record(samples={3: [sample("1", spans, completion="</script><script>alert(1)</script>")]})
    html = render(report_of(made))
    assert html.count("<script") == 2
    assert "alert(1)</script>" in data_of(html)["samples"]["3"][0]["completion"]


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write(report_of(record()), tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_the_command_makes_a_report_from_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "record.json", tmp_path / "out"
    Recorder(record()).save(file)
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / "index.html")
    assert data_of((out / "index.html").read_text(encoding="utf-8"))["job"] == "countdown-abc"


def test_report_refuses_a_file_that_is_not_a_record(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "no.json")])
    assert result.exit_code == 2
    assert "name the record.json of a run" in result.stderr
