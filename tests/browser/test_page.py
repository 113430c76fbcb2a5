"""The web page in a real browser, beside a real system: what a user reads and presses."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.black_box import BlackBox, black_box
from tests.support.small_job import small_job

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="run 'make test-browser', which installs it")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

STALLS = {
    "trainer": "Waiting for the trainer: it does not renew its lease",
    "weight_store": "the weight store at http",
}
"""Role of a process that hangs -> what the page says then. The trainer or a worker waits for the weight store."""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlackBox]:
    with black_box(tmp_path_factory.mktemp("page") / "state", workers=2, autoscale=3) as box:
        yield box


def is_present(worker: dict[str, Any]) -> bool:
    return worker["state"] not in {"lost", "left"}


def test_login_with_a_wrong_token_is_refused_and_with_the_right_one_works(box: BlackBox, page: Page) -> None:
    page.goto(box.url)
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("token")
    page.fill("#token", box.token)
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#worker-table")).to_contain_text(re.compile(r"worker-\d"))
    page.get_by_role("button", name="Log out").click()
    sync_api.expect(page.locator("#token")).to_be_visible()


def test_page_shows_steps_losses_waits_and_samples_and_pauses_the_job(box: BlackBox, page: Page) -> None:
    job_id = box.submit(small_job(steps=400))
    page.goto(f"{box.url}/#token={box.token}")
    page.get_by_role("link", name=job_id).first.click()
    assert box.token not in page.url
    sync_api.expect(page.locator("#state")).to_have_text("running")
    sync_api.expect(page.locator("#step-line")).to_contain_text(re.compile(r"Step \d+ took .* s: .* %"))
    sync_api.expect(page.locator("#reward svg polyline")).to_have_count(1)

    assert box.until_busy(job_id)
    os.kill(box.processes("preemptible")[0]["pid"], signal.SIGKILL)
    sync_api.expect(page.locator("#preemption-line")).to_contain_text("1 preemption (1 without notice)")
    sync_api.expect(page.locator("#gantt")).to_contain_text("✕")
    sync_api.expect(page.locator("#preemption-line")).to_contain_text("0 duplicates, 0 dropped")
    sync_api.expect(page.locator("#preemption-table")).to_contain_text("none")

    sync_api.expect(page.locator("#waiting")).to_contain_text(
        re.compile(r"^(Training step \d+|Publishing weights), for ")
    )
    for role, text in STALLS.items():
        hanging = box.processes(role)[0]["pid"]
        os.kill(hanging, signal.SIGSTOP)
        try:
            sync_api.expect(page.locator("#waiting")).to_contain_text(text)
        finally:
            os.kill(hanging, signal.SIGCONT)

    page.get_by_role("button", name="Pause").click()
    sync_api.expect(page.locator("#state")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    sync_api.expect(page.locator("#state")).to_have_text("running")

    page.select_option("#sample-order", "moved")
    sync_api.expect(page.locator("#samples mark").first).to_be_visible()
    sync_api.expect(page.locator("#samples .legend li").first).to_contain_text(re.compile(r"version \d+: \d+ tokens"))

    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes").click()
    sync_api.expect(page.locator("#state")).to_have_text("cancelled")


def test_read_only_link_shows_the_fleet_and_no_button_that_acts(box: BlackBox, page: Page) -> None:
    page.goto(box.command("page", "--read-only").strip())
    sync_api.expect(page.locator("#worker-table")).to_contain_text(re.compile(r"worker-\d"))
    assert "token" not in page.url
    assert page.get_by_role("button", name=re.compile("Drain|Scale")).all() == []
    page.get_by_role("button", name="Log out").click()
    page.fill("#token", box.token)
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("button", name="Drain").first).to_be_visible()


def test_page_on_a_phone_does_not_scroll_sideways(box: BlackBox, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{box.url}/#token={box.token}")
    sync_api.expect(page.locator("#worker-table")).to_contain_text("worker-2")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_drain_button_asks_and_ends_the_worker_with_its_samples_handed_off(box: BlackBox, page: Page) -> None:
    job_id = box.submit(small_job(steps=400, seed=1))
    assert box.until_busy(job_id)
    (worker,) = [one["id"] for one in box.get("/v1/workers") if one["id"].startswith("worker-2-") and is_present(one)]
    page.goto(f"{box.url}/#token={box.token}")
    drain = page.locator("#worker-table tr", has_text="worker-2").get_by_role("button", name="Drain")
    for answer in ("No", "Yes"):
        drain.click()
        sync_api.expect(page.get_by_role("dialog")).to_contain_text("Drain worker-2? It hands its samples to other")
        assert worker in {one["id"] for one in box.get("/v1/workers") if one["state"] in {"ready", "pulling"}}
        page.get_by_role("button", name=answer).click()
    page.get_by_role("link", name=job_id).first.click()
    left = page.locator("#gantt title", has_text="worker-2 left: requested over REST")
    sync_api.expect(left).to_have_count(1)
    assert worker not in {one["id"] for one in box.get("/v1/workers") if is_present(one)}
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes").click()
    sync_api.expect(page.locator("#state")).to_have_text("cancelled")
    audit = box.get(f"/v1/jobs/{job_id}/audit")
    assert audit["preemptions"].get("without_notice", 0) == audit["duplicates"] == 0


def test_scale_button_changes_the_number_of_spot_workers(box: BlackBox, page: Page) -> None:
    page.goto(f"{box.url}/#token={box.token}")
    page.fill("#scale-workers", "3")
    page.get_by_role("button", name="Scale").click()
    sync_api.expect(page.locator("#fleet-line")).to_contain_text("Autoscaling (3): 3 of at most 3 local.")
    page.fill("#scale-workers", "")
    page.get_by_role("button", name="Scale").click()
    sync_api.expect(page.locator("#fleet-line")).to_contain_text("Autoscaling (auto)")
