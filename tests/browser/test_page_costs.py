"""What a job has cost, in a real system with prices: the same on the page, in the terminal and over REST."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlboost.job_lines import cost_line, dollars
from tests.support.black_box import BlackBox, black_box
from tests.support.small_job import small_job

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="run 'make test-browser', which installs it")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
PRICES = {"preemptible": 36.0, "reserved": 36.0, "trainer": 7.2}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlackBox]:
    """A system whose manager has a price file, and whose trainer has a machine of its own."""
    (tmp_path / "prices.yaml").write_text(f"workers: {{torch-cpu: {PRICES['preemptible']}}}\n", encoding="utf-8")
    monkeypatch.setenv("RLBOOST_MANAGER_PRICE_FILE", str(tmp_path / "prices.yaml"))
    monkeypatch.setenv("RLBOOST_TRAINER_PRICE_PER_HOUR", str(PRICES["trainer"]))
    with black_box(tmp_path / "state", workers=1) as box:
        yield box


def test_end_of_a_job_shows_the_same_cost_everywhere(box: BlackBox, page: Page) -> None:
    job_id = box.submit(small_job(steps=6))
    box.until_completed(job_id)
    cost = box.get(f"/v1/jobs/{job_id}/cost")
    paid = {of["role"]: of for of in cost["workers"]}
    assert {role: of["dollars"] / of["hours"] for role, of in paid.items()} == pytest.approx(PRICES)
    assert cost["dollars"] == pytest.approx(sum(of["dollars"] for of in cost["workers"]))
    assert cost["reserved_only"]

    first, *more = cost_line(cost).split("\n")
    page.goto(f"{box.url}/#token={box.token}")
    page.get_by_role("link", name=job_id).first.click()
    sync_api.expect(page.locator("#cost-line")).to_have_text(first)
    assert set(more) <= set(page.locator("#cheaper li").all_text_contents())
    sync_api.expect(page.locator("#worker-table")).to_contain_text("$36.00")

    for command in ("status", "follow"):
        assert " ".join([first, *more]) in " ".join(box.command(command, job_id).split())

    (job,) = json.loads(box.command("top", "--json"))["jobs"]
    assert (job["dollars"], job["dollars_per_step"]) == (cost["dollars"], cost["dollars_per_step"])
    top = box.command("top", "--once")
    assert f"{dollars(cost['dollars'])} ({dollars(cost['dollars_per_step'])} a step)" in top
    assert "$36.00" in top
