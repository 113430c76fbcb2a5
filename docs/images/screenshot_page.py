"""Draw the web page during the recipe `tools`, which loses workers: `web-page.png`, and its top `job.png`.

make screenshots
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import FloatRect, sync_playwright

from rlboost.jobs import new_folder
from rlboost.jobs.file import resolved
from rlboost.shared.job.file import load
from tests.support.black_box import ROOT, BlackBox, black_box

PREEMPTIONS = {8: ("worker-1", signal.SIGKILL), 16: ("worker-2", signal.SIGTERM), 25: ("worker-3", signal.SIGKILL)}
"""By step: a worker that generates then, and SIGTERM for one with notice."""
DRAWN_AT = 34
"""Step of the recipe's 40 after which the page is drawn."""
PAGE_OPEN_MS = 5_000
"""Until then it has drawn all that has happened."""
WIDTH, HEIGHT, MARGIN = 1180, 2890, 14


def main() -> None:
    """Run the recipe's job as it is, and draw the page shortly before its end."""
    os.environ["RLBOOST_TRAINER_PRICE_PER_HOUR"] = "12"  # a reserved machine, and spot workers at a fraction of it
    os.environ["RLBOOST_WORKER_PRICE_PER_HOUR"] = "0.8"
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tools"
        new_folder.make(folder, recipe="tools")
        os.chdir(folder)
        os.environ["RLBOOST_TRAINER_FOLDERS"] = str(folder)
        os.environ["PYTHONPATH"] = f"{folder}:{ROOT}"  # of the processes, which import the environment
        subprocess.run([sys.executable, "prepare.py"], check=True)
        job = resolved("job.yaml", load("job.yaml"))
        with black_box(folder / ".rlboost", workers=3) as box:
            job_id = box.submit(job)
            for step, (worker, number) in PREEMPTIONS.items():
                box.until_step(job_id, step, within_s=900)
                preempt(box, worker, number)
            box.until_step(job_id, DRAWN_AT, within_s=900)
            draw(box)


def preempt(box: BlackBox, name: str, number: signal.Signals) -> None:
    """Send a signal to a worker that is generating."""
    box.until(lambda: any(is_busy(worker, name) for worker in box.get("/v1/workers")), f"samples on {name}")
    (pid,) = (process["pid"] for process in box.processes("preemptible") if process["name"] == name)
    os.kill(pid, number)


def is_busy(worker: dict[str, Any], name: str) -> bool:
    """Return True if a worker has this name and samples."""
    return bool(worker["id"].startswith(f"{name}-") and worker["running"] > 2)


def draw(box: BlackBox) -> None:
    """Write the two pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"{box.url}/#token={box.token}")
        page.locator("#jobs a").first.click()
        page.locator("#samples .turns").first.wait_for()
        page.wait_for_timeout(PAGE_OPEN_MS)
        page.screenshot(path=Path(__file__).parent / "web-page.png")
        workers = page.locator("section", has=page.locator("#speeds")).bounding_box()
        assert workers is not None, "the workers over time are drawn"
        top = FloatRect(x=0, y=0, width=WIDTH, height=workers["y"] + workers["height"] + MARGIN)
        page.screenshot(path=Path(__file__).parent / "job.png", clip=top)
        browser.close()


if __name__ == "__main__":
    main()
