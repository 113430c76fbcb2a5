"""Reports in a real browser, from a file and without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from rlboost.report import Record, report_of, write
from tests.support.synthetic_record import record, sample, unfinished

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="run 'make test-browser', which installs it")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def opened(page: Page, made: Record, folder: Path) -> list[str]:
    """Open a report's file; return what it asks for and what its console shows, a list that grows."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.goto(write(report_of(made), folder).as_uri())
    return seen


def test_report_shows_a_whole_run_and_asks_for_nothing(page: Page, tmp_path: Path) -> None:
    seen = opened(page, record(), tmp_path)
    expect = sync_api.expect
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator("#report-text")).to_contain_text("Every guarantee held. 12 steps of GRPO")
    expect(page.locator("#checks")).to_contain_text("3,276 requested = 3,276 delivered + 0 dropped")
    expect(page.locator("#appendix")).to_contain_text("spot engines")
    for name in ("reward", "evaluation", "length", "gantt", "speeds", "steps"):
        expect(page.locator(f"#{name} svg")).to_have_count(1)
    expect(page.locator("#gantt")).to_contain_text("silent")
    expect(page.locator("#gantt title", has_text="50 samples migrated from worker-2")).to_have_count(0)
    expect(page.locator("#gantt title", has_text="30 samples migrated from worker-2 to worker-1")).to_have_count(1)
    expect(page.locator("#preemption-table tbody tr")).to_have_count(2)
    expect(page.locator("#preemption-table")).to_contain_text(re.compile(r"worker-2none50\s*2,500\s*2\.6 s"))
    expect(page.locator("#samples .legend li").first).to_have_text("worker-2, version 2: 11 tokens")
    expect(page.locator("#samples mark").first).to_have_text("<think>3+8=11*4=44 ✓</th")
    page.get_by_text("Every sample and token").click()
    expect(page.locator("#audit")).to_contain_text("tokens preserved by migrated samples5,000")
    assert page.get_by_role("button").all_inner_texts() == ["Show"]
    assert [url for url in seen if not url.startswith(("file:", "data:"))] == []


def test_conversation_is_shown_turn_by_turn(page: Page, tmp_path: Path) -> None:
    call = '{"name": "multiply", "arguments": {"a": 12, "b": 7}}'
    messages = [
        {
            "role": "assistant",
            "content": "I multiply.",
            "tool_calls": [call],
            "spans": [["worker-2-aaaa", 2, 11]],
            "time": [0.0, 1.5],
        },
        {"role": "environment", "content": "84", "reward": 0.0, "over": ""},
        {"role": "assistant", "content": "<b>84</b>", "tool_calls": [], "spans": [["worker-1-aaaa", 2, 5]]},
        {"role": "environment", "content": "", "reward": 1.0, "over": "done"},
    ]
    spans = [("worker-2-aaaa", 2, 11), ("worker-1-aaaa", 2, 5)]
    opened(page, record(samples={3: [sample("1", spans, turns=2, duration_s=6.0, messages=messages)]}), tmp_path)
    bar = page.locator(".turns .time i").bounding_box()
    track = page.locator(".turns .time").bounding_box()
    assert bar is not None
    assert track is not None
    assert bar["width"] == pytest.approx(track["width"] / 4, abs=1)
    assert page.locator(".turns li").all_inner_texts() == [
        "model, turn 1\nfrom 0.0 s for 1.5 s\nworker-2, version 2\n\nI multiply.\ncalls multiply(a=12, b=7)",
        "environment\n\n84",
        "model, turn 2\nworker-1, version 2\n\n<b>84</b>",
        "environment\nreward 1, ended the conversation",
    ]


def test_arrow_keys_select_the_step_that_is_explained(page: Page, tmp_path: Path) -> None:
    opened(page, record(), tmp_path)
    line = page.locator("#step-line")
    sync_api.expect(line).to_contain_text("Step 12 took 4.8 s: training 1.8 s (38 %), waiting for samples 1.5 s (31 %)")
    page.focus("#steps")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(line).to_contain_text("Step 11 took")
    page.hover("#steps svg", position={"x": 5, "y": 100})
    sync_api.expect(line).to_contain_text("Step 1 took")


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(245, 247, 249)"), ("dark", "rgb(18, 23, 28)")])
def test_report_fits_a_phone_in_light_and_dark(
    page: Page, tmp_path: Path, scheme: Literal["light", "dark"], background: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, record(), tmp_path)
    sync_api.expect(page.locator("#samples mark").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    sync_api.expect(page.locator("body")).to_have_css("background-color", background)


def test_charts_follow_the_width_of_the_window(page: Page, tmp_path: Path) -> None:
    opened(page, record(), tmp_path)
    page.set_viewport_size({"width": 600, "height": 800})
    sync_api.expect(page.locator("#steps svg")).to_have_attribute("viewBox", re.compile(r"0 0 5\d\d 190"))


def test_report_of_a_run_that_ended_at_once_names_what_is_missing(page: Page, tmp_path: Path) -> None:
    opened(page, unfinished(), tmp_path)
    sync_api.expect(page.locator("#name")).to_have_text("no job")
    sync_api.expect(page.locator("#steps")).to_contain_text("No step has ended yet.")
    sync_api.expect(page.locator("#gantt")).to_contain_text("No worker has joined yet.")


def test_markup_in_a_report_is_text(page: Page, tmp_path: Path) -> None:
    text = "</script><img src=x onerror=alert(1)>"
    spans = [("worker-1-aaaa", 2, 9)]
    seen = opened(page, record(samples={3: [sample("1", spans, completion=text, span_characters=None)]}), tmp_path)
    page.fill("#sample-step", "3")
    page.get_by_role("button", name="Show").click()
    sync_api.expect(page.locator("#samples mark")).to_have_text(text)
    assert page.locator("#samples img").count() == 0
    page.fill("#sample-step", "7")
    page.get_by_role("button", name="Show").click()
    sync_api.expect(page.locator("#samples")).to_have_text(
        "No samples of step 7 are retained. This report has those of the steps 3."
    )
    assert [url for url in seen if not url.startswith(("file:", "data:"))] == []
