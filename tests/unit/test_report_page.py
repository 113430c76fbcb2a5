from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.demo.recorder import Recorder
from rlboost.report.page import SECTIONS, render, write
from rlboost.report.record import Record
from tests.support.synthetic_record import record, unfinished


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(record(), tmp_path_factory.mktemp("report"))


def test_the_page_has_every_section_and_figure(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'<section id="(\w+)">', text)
    assert found == ["audit", "learning", "fleet", "steps", "tokens", "journeys", "counters", "cpu_time", "settings"]
    assert text.count("<svg") == text.count("</svg>") == len(SECTIONS) == 4
    assert "Every guarantee held" in text
    assert "3,276 requested = 3,276 delivered + 0 dropped" in text
    assert "<b>worker-2</b> 11 tokens → <b>worker-1</b> 9 tokens" in text


def test_the_page_needs_nothing_from_outside(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe|image)\b", text)
    assert not re.search(r"url\((?!#)", text)
    references = re.findall(r'(?:src|(?<!xlink:)href|xlink:href)="([^"]*)"', text)
    assert all(reference.startswith("#") for reference in references)


def test_the_ids_of_the_figures_do_not_meet_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    clips = re.findall(r'<clipPath id="(\w+)"', text)
    assert len(clips) == len(set(clips))


def test_each_figure_is_there_as_a_picture(page: Path) -> None:
    pictures = sorted((page.parent / "figures").iterdir())
    assert [picture.name for picture in pictures] == ["fleet.png", "learning.png", "steps.png", "tokens.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_same_record_gives_the_same_bytes(page: Path, tmp_path: Path) -> None:
    again = write(record(), tmp_path)
    assert again.read_bytes() == page.read_bytes()
    for name in ("fleet", "steps"):
        first, second = (folder / "figures" / f"{name}.png" for folder in (page.parent, tmp_path))
        assert first.read_bytes() == second.read_bytes()


def test_the_page_has_the_warnings_that_held_at_the_end() -> None:
    made = record()
    made.job["warnings"] = ["nothing <learned>"]
    page = render(made, {section.name: "" for section in SECTIONS})
    assert "Warning: nothing &lt;learned&gt;" in page
    assert "Warning:" not in render(record(), {section.name: "" for section in SECTIONS})


def quiet() -> Record:
    made = record(changes=[], planned=[], journeys=[])
    made.settings.chaos = False
    return made


@pytest.mark.parametrize("made", [unfinished(), quiet()], ids=["unfinished", "quiet"])
def test_a_run_with_little_to_show_has_a_report_too(made: Record, tmp_path: Path) -> None:
    text = write(made, tmp_path).read_text(encoding="utf-8")
    assert ("Some guarantees were violated" in text) == (not made.steps)
    assert "No retained sample had more than one worker" in text


def test_report_escapes_foreign_text() -> None:
    made = record()
    made.journeys[0].completion = "<script>alert(1)</script>"
    made.job["name"] = "<b>$name"
    text = render(made, {section.name: "<svg></svg>" for section in SECTIONS})
    assert "<script" not in text
    assert "&lt;b&gt;$name" in text


def test_the_command_makes_a_report_from_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "record.json", tmp_path / "out"
    Recorder(record()).save(file)
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / "index.html")
    assert (out / "index.html").exists()


def test_report_refuses_a_file_that_is_not_a_record(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "no.json")])
    assert result.exit_code == 2
    assert "name the record.json of a run" in result.stderr
