"""A job of several ranks, where one is killed after the first checkpoint."""

from __future__ import annotations

import os
import signal
from contextlib import closing, suppress
from typing import Any

from tests.support.black_box import BlackBox, Observer
from tests.support.ranks import ranks_of
from tests.support.small_job import check


def events_with_a_killed_rank(box: BlackBox, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a small job with a checkpoint at step 2, kill a rank after it, and return the events of the completed job."""
    job_id = box.submit(spec)
    with closing(Observer(box.redis_url, job_id)) as observer:
        checkpoint = box.state / "runs" / job_id / "checkpoints" / "step-000002"
        box.until(checkpoint.is_dir, "there is a checkpoint")
        _kill_a_rank(box)
        box.until_completed(job_id)
    check(box, job_id, observer, spec)
    events = box.events(job_id)
    assert "job_resumed" in {event["kind"] for event in events}
    return events


def _kill_a_rank(box: BlackBox) -> None:
    def killed() -> bool:
        for process in box.processes("trainer"):
            for rank in ranks_of(process["pid"])[1:]:
                with suppress(ProcessLookupError):  # it is gone since it was listed
                    os.kill(rank, signal.SIGKILL)
                    return True
        return False

    box.until(killed, "the trainer has ranks")
