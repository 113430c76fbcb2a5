"""A job with an environment, in real processes: its worker and its trainer are killed, no turn is lost or doubled."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.services.trainer.domain.conversations import StepTurnIds, TurnIds
from tests.support.black_box import ROOT, Observer, black_box

pytestmark = pytest.mark.timeout(600)

STEPS, PROMPTS, GROUP = 4, 6, 4
EVAL_SAMPLES = PROMPTS
IDS = StepTurnIds(TurnIds(PROMPTS, GROUP, max_turns=2), TurnIds(EVAL_SAMPLES, 1, max_turns=2))
"""By whether it is an evaluation."""


def second_try() -> dict[str, Any]:
    """Return the example's job, with few prompts a step."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/second_try/job.yaml").read_text())
    spec["data"]["prompts_per_step"] = PROMPTS
    spec["algorithm"]["group_size"] = GROUP
    spec["trainer"]["checkpoint_every"] = 2
    return {**spec, "steps": STEPS, "eval": {"every": 10, "samples": EVAL_SAMPLES}}


def assert_turns_follow_each_other(observer: Observer) -> int:
    """Assert that each second turn was given what its own first was given, what that made, and more; count them.

    The request of a turn may be trimmed before the observer comes to it, at the job's end at the latest.
    """
    n_second = 0
    for turn, request in observer.admitted.items():
        sample, number = IDS.of(turn).turn_of(turn)
        if number == 1 and sample in observer.admitted:
            before = observer.admitted[sample]["prompt"] + observer.finished[sample][0]["tokens"]
            assert request["prompt"].startswith(before)
            assert len(request["prompt"]) > len(before)
            assert request["preferred_worker"]
            n_second += 1
    return n_second


@pytest.mark.long
def test_a_game_of_two_turns_survives_the_death_of_a_worker_and_of_the_trainer(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", workers=2) as box:
        with box.begun_on_spot(second_try(), 2) as (job_id, observer):
            pids = {process["role"]: process["pid"] for process in box.processes()}
            for step, role in enumerate(("preemptible", "trainer")):
                box.until_step(job_id, step)
                assert box.until_busy(job_id)
                os.kill(pids[role], signal.SIGKILL)
            box.until_completed(job_id)
        n_turns = observer.check()
        n_second = assert_turns_follow_each_other(observer)
        audit = box.get(f"/v1/jobs/{job_id}/audit")
        assert audit["requested"] == audit["delivered"] == n_turns
        assert n_second > 0
        if len(observer.admitted) == n_turns:
            assert n_turns == n_second + STEPS * PROMPTS * GROUP + 2 * EVAL_SAMPLES
        assert (audit["dropped"], audit["in_flight"]) == ({}, 0)
        assert audit["preemptions"]["without_notice"] >= 1
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        assert all(row["groups/dropped"] == row["samples/duplicates"] == 0 for row in rows)
        trained = rows[:STEPS]
        assert all(1 <= row["turns/mean"] <= 2 for row in trained)
        assert max(row["turns/max"] for row in trained) == 2
        assert sum(row["tokens/observation"] for row in trained) > 0
        shown = box.get(f"/v1/jobs/{job_id}/samples")
        assert {sample["reward"] for sample in shown} <= {0.0, 0.5, 1.0}
        assert {sample["turns"] for sample in shown} == {1, 2}
