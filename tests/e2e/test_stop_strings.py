"""A job whose samples end at stop strings, while a worker dies."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from rlboost.shared.wire import I32, ints
from tests.support.black_box import BlackBox, black_box
from tests.support.countdown_model import EXAMPLE, CountdownModel
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)

STOPS = ["=10 ✗", "</think>"]
"""The first is several tokens of the model."""


def has_samples(box: BlackBox, name: str) -> bool:
    return any(worker["id"].startswith(name) and worker["running"] for worker in box.get("/v1/workers"))


def test_samples_end_at_stop_strings_whatever_dies(tmp_path: Path) -> None:
    """Training and evaluation samples end with the token that completes a stop string, or without any."""
    tokenizer, spec = CountdownModel(EXAMPLE / "base").tokenizer, small_job(steps=6)
    spec["sampling"] |= {"stop": STOPS, "top_k": 40, "min_tokens": 2}
    with black_box(tmp_path / "state", workers=2) as box:
        with box.begun_on_spot(spec, 2) as (job_id, observer):
            victim = box.processes("preemptible")[0]
            box.until(partial(has_samples, box, victim["name"]), "the worker has samples", every_s=0.01)
            os.kill(victim["pid"], signal.SIGKILL)
            box.until_completed(job_id)
        audit = check(box, job_id, observer, spec)
    assert audit["preemptions"]["without_notice"] == 1
    stopped = 0
    for (sample,) in observer.finished.values():
        tokens = ints(sample["tokens"], I32)
        text, before = (tokenizer.decode(each, skip_special_tokens=True) for each in (tokens, tokens[:-1]))
        assert not any(stop in before for stop in STOPS), text
        stopped += any(stop in text for stop in STOPS)
        assert sample["finish"] == "stop" or not any(stop in text for stop in STOPS)
    assert stopped > len(observer.finished) / 2
