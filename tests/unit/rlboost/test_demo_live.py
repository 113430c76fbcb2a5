from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rlboost.demo.live import EventLine, EventLines, Lines, Picture, Screen, view_of
from rlboost.demo.summary import summary
from rlboost.report import Record
from tests.support.synthetic_record import AUDIT, BEGAN_AT, END_AT, record, unfinished


def printed(what: Any, width: int = 110) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False).print(what)
    return file.getvalue()


def picture(made: Record, width: int = 110, height: int = 40, news: tuple[EventLine, ...] | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(Picture(made, tuple(EventLines(made).new_lines()) if news is None else news, "running", END_AT))
    return console.export_text()


def test_picture_shows_step_accuracy_speed_workers_and_wait() -> None:
    made = record()
    made.observations[-1].waiting_for = "samples of step 12"
    made.observations[-1].waiting_because = "3 of 204 samples are there"
    text = picture(made)
    assert "step 12/12" in text
    assert "1:16" in text
    assert "17% -> 77%" in text
    assert "3,400 tokens/s" in text
    assert "waiting for samples of step 12 because 3 of 204 samples are there" in text
    assert "2 of 2 preemptions (1 without notice), 2 joins" in text
    for worker in ("reserved-1", "worker-3", "worker-4", "worker-5"):
        assert worker in text
    assert "▼ worker-1 gets notice" in text


SIZES = [(80, 24), (80, 30), (120, 40), (170, 50)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("waits", ["samples", "a worker that is ready " * 12])
def test_the_picture_fits_the_terminal_with_whole_borders_and_words(width: int, height: int, waits: str) -> None:
    made = record()
    made.observations[-1].waiting_for, made.observations[-1].waiting_because = waits, "so"
    events = [EventLine(BEGAN_AT + n, "plain", f"  event{n} " + "antidisestablishmentarianism " * 4) for n in range(20)]
    shown = picture(made, width, height, tuple(events)).splitlines()
    assert len(shown) < height
    assert all(len(line) == width for line in shown)
    assert (shown[0][0], shown[0][-1], shown[-1][0], shown[-1][-1]) == ("╭", "╮", "╰", "╯")
    assert all((line[0], line[-1]) == ("│", "│") for line in shown[1:-1])
    words = {word for line in shown for word in line.split() if word.startswith("antidis")}
    assert words == {"antidisestablishmentarianism"}
    numbers = [int(word.removeprefix("event")) for line in shown for word in line.split() if word.startswith("event")]
    assert numbers == list(range(20 - len(numbers), 20))  # the newest
    assert "2 of 2 preemptions" in "\n".join(shown)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_newest_values_of_the_charts_are_visible(width: int, height: int) -> None:
    made = record()
    made.steps = [{"step": step, "reward/mean": float(step == 199)} for step in range(200)]
    made.settings.steps = 200
    [line] = [line for line in picture(made, width, height).splitlines() if " reward " in line]
    assert line.rstrip("│ ").endswith("▁█")


def test_a_very_low_terminal_shows_the_most_important_sections() -> None:
    shown = picture(record(), 80, 10).splitlines()
    assert len(shown) < 10
    assert "step 12/12" in shown[1]
    assert shown[-1].startswith("╰")


def test_picture_before_the_first_observation_shows_starting() -> None:
    text = printed(Picture(unfinished(), (), "starting", BEGAN_AT))
    assert "step 0/12" in text
    assert "starting" in text


def test_a_terminal_gets_the_picture_and_anything_else_gets_lines() -> None:
    assert isinstance(view_of(record(), Console(file=io.StringIO(), force_terminal=True)), Screen)
    assert isinstance(view_of(record(), Console(file=io.StringIO(), force_terminal=False)), Lines)


def test_the_screen_is_redrawn_as_the_record_grows() -> None:
    made, file = unfinished(), io.StringIO()
    with view_of(made, Console(file=file, force_terminal=True, width=110)) as view:
        view.show("starting", BEGAN_AT)
        made.observations = record().observations
        view.show("running", END_AT)
    text = file.getvalue()
    assert text.index("starting") < text.index("worker-5")


def test_lines_show_each_step_and_event_once() -> None:
    full, made, file = record(), unfinished(), io.StringIO()
    with view_of(made, Console(file=file, force_terminal=False)) as view:
        view.show("starting", BEGAN_AT)
        view.show("starting", BEGAN_AT + 1)
        made.steps, made.job_events, made.process_events = full.steps, full.job_events, full.process_events
        view.show("running", END_AT)
        view.show("running", END_AT)
    text = file.getvalue().splitlines()
    assert sum("starting" in line for line in text) == 1
    assert sum("reward/mean" in line for line in text) == 12
    assert [line for line in text if "worker-2" in line] == [
        "0:23  ✗ worker-2 is gone without notice (SIGKILL)",
        "0:25  50 unfinished samples of worker-2 migrate with their 2,500 tokens",
        "0:25  worker-2 was declared lost: its lease ran out",
    ]


def test_the_handover_at_each_step_is_not_shown() -> None:
    assert not any("reserved-1" in news.text for news in EventLines(record()).new_lines())


def test_summary_shows_results_checks_and_cost() -> None:
    text = printed(summary(record()), 160)
    assert "17.0% (step 0) -> 77.0% (step 12)" in text
    assert "300 of 200,300 (0.15%): late 300" in text
    assert text.count("✓") == 7
    assert "processor time 172 s on 2 cores; 20 s of it to start" in text
    assert "spot engines" in text


def test_the_summary_of_a_run_that_went_wrong_names_the_broken_promises() -> None:
    text = printed(summary(record(audit=AUDIT | {"delivered": 3000, "tokens_regenerated": {}})), 160)
    assert "3,276 requested = 3,000 delivered + 0 dropped" in text
    assert text.count("✗") == 2
    assert "tokens regenerated" in text
    assert printed(summary(unfinished())).count("✗") == 6
