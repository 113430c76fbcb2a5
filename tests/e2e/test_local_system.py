"""The whole system, real in every part, with a small Countdown job: whatever dies, nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.black_box import RLBOOST, ROOT, BlackBox, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(900)

ROLES = ("preemptible", "manager", "trainer", "weight_store", "redis", "reserved")
NOTICES = [("preemptible", signal.SIGTERM), ("reserved", signal.SIGTERM)]


class Run:
    """One job and what was seen of it."""

    def __init__(self, box: BlackBox, steps: int) -> None:
        self.spec = small_job(steps, elastic={"weights": "delta"})
        self.id = box.submit(self.spec)
        self.observer = Observer(box.redis_url, self.id)


@contextmanager
def joined_by_hand(box: BlackBox, log: Path) -> Iterator[Callable[[], None]]:
    """Start a worker as a user does; yield what waits until it is ready. It must leave in order at the end."""
    command = [*RLBOOST, "worker", "join", "--url", box.url, "--token", box.token]
    env = {**os.environ, "RLBOOST_WORKER_CACHE_DIR": str(log.with_suffix(""))}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env)

    def is_ready() -> bool:
        assert process.poll() is None, f"exit code {process.returncode}"
        return any(w["state"] == "ready" for w in box.get("/v1/workers") if w["pid"] == process.pid)

    def until_ready() -> None:
        try:
            box.until(is_ready, "the worker that joined by hand is ready")
        except AssertionError as error:
            error.add_note(f"rlboost worker join: {log.read_text()}\n{box.get('/v1/workers')}")
            raise

    try:
        yield until_ready
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def came_back(box: BlackBox, names: list[str]) -> bool:
    return any(process["restarts"] for process in box.processes() if process["name"] in names)


@pytest.mark.long
def test_a_job_survives_the_death_of_every_process(tmp_path: Path) -> None:
    signals = [(role, signal.SIGKILL) for role in ROLES] + NOTICES
    chaos = random.Random(20251021).sample(signals, len(signals))
    with (
        black_box(tmp_path / "state", workers=2, standby=True) as box,
        joined_by_hand(box, tmp_path / "joined.log") as until_ready,
        ExitStack() as observers,
    ):
        runs = [Run(box, steps=8)]
        observers.callback(runs[-1].observer.close)
        until_ready()
        for role, number in chaos:
            while not box.until_busy(runs[-1].id):  # it is done before the chaos is
                runs.append(Run(box, steps=8))
                observers.callback(runs[-1].observer.close)
            box.kill(box.leader() if role == "manager" else role, number)
        audits = []
        for run in runs:
            box.until_completed(run.id)
            audits.append(check(box, run.id, run.observer, run.spec))
        assert sum(audit["preemptions"].get("without_notice", 0) for audit in audits) >= 1
        for names in (["trainer"], ["weight-store"], ["redis"], ["reserved-1"], ["manager", "standby"]):
            box.until(partial(came_back, box, names), f"{' and '.join(names)} died and came back")
