"""Draw the web page during a Countdown job of 45 steps that loses a worker: `web-page.png`, and its top `job.png`.

make screenshots
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import yaml
from playwright.sync_api import FloatRect, sync_playwright

from tests.support.black_box import ROOT, black_box

PAGE_OPEN_MS = 5_000
"""Until then it has drawn all that has happened."""
WIDTH, HEIGHT = 1180, 2430
TOP = 1228
"""Height of the part with the curves and the workers over time."""


def main() -> None:
    """Run the job and draw the page shortly before its end."""
    spec = {**yaml.safe_load((ROOT / "examples/countdown/job.yaml").read_text()), "steps": 45}
    spec["elastic"]["seeding"] = "auto"
    os.environ["RLBOOST_TRAINER_PRICE_PER_HOUR"] = "12"  # a reserved machine, and spot workers at a fraction of it
    os.environ["RLBOOST_WORKER_PRICE_PER_HOUR"] = "0.8"
    with tempfile.TemporaryDirectory() as folder, black_box(Path(folder) / "state", workers=3) as box:
        job_id = box.submit(spec)
        box.until_step(job_id, 14, within_s=600)
        box.until(lambda: all(worker["running"] > 2 for worker in box.get("/v1/workers")), "samples on all workers", 60)
        time.sleep(1)  # they have generated tokens that a migration preserves
        box.kill("preemptible")
        box.until_step(job_id, 20, within_s=600)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(f"{box.url}/#token={box.token}")
            page.locator("#jobs a").first.click()
            page.select_option("#span", "120")
            page.locator("#samples mark").first.wait_for()
            page.wait_for_timeout(PAGE_OPEN_MS)
            page.screenshot(path=Path(__file__).parent / "web-page.png")
            clip = FloatRect(x=0, y=0, width=WIDTH, height=TOP)
            page.screenshot(path=Path(__file__).parent / "job.png", clip=clip)
            browser.close()


if __name__ == "__main__":
    main()
