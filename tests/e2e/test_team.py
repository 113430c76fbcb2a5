"""Two policies that learn together: both trainers, the manager and a worker are killed while their agent runs."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.black_box import ROOT, Observer, black_box

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS, PROMPTS, GROUP = 5, 4, 4
FAULTS = ("groups/dropped", "conversations/lost", "samples/duplicates")


def team(**changes: Any) -> dict[str, Any]:
    """Return the example's job, with few prompts a step."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/team/job.yaml").read_text())
    spec["data"]["prompts_per_step"] = PROMPTS
    spec["algorithm"]["group_size"] = GROUP
    spec["trainer"]["checkpoint_every"] = 2
    return {**spec, "steps": STEPS, "eval": {"every": 10, "samples": PROMPTS}, **changes}


def test_team_survives_the_death_of_each_trainer_manager_and_worker(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", trainers=2, reserved=2, workers=2) as box, ExitStack() as stack:
        solver = box.submit(team())
        jobs = [solver, f"{solver}.verifier"]
        observers = [stack.enter_context(closing(Observer(box.redis_url, job))) for job in jobs]
        for step, victim in enumerate((jobs[0], jobs[1], "manager", "preemptible")):
            box.until_step(solver, step)
            assert box.until_busy(solver)
            if victim in jobs:
                box.kill_trainer_of(victim)
            else:
                box.kill(victim)
        for job in jobs:
            box.until_completed(job)
        sessions = []
        for job, observer in zip(jobs, observers, strict=True):
            observer.close()
            n_turns = observer.check()
            audit = box.get(f"/v1/jobs/{job}/audit")
            assert audit["requested"] == audit["delivered"] == n_turns, audit
            assert (audit["dropped"], audit["in_flight"]) == ({}, 0)
            rows = box.get(f"/v1/jobs/{job}/metrics")
            assert [row["step"] for row in rows] == list(range(STEPS + 1))
            faults = {name: [row.get(name, 0) for row in rows] for name in FAULTS}
            assert not any(map(any, faults.values())), faults
            # The trainer computes the log-probabilities of each row again: they are of its own policy's tokens.
            assert max(row["mismatch_kl"] for row in rows if "mismatch_kl" in row) < 1e-5
            # Each step's tokens are of that step's version: the barrier of the two policies.
            assert all(step == version for step, version in observer.versions())
            shown = box.get(f"/v1/jobs/{job}/samples")
            assert len(shown) == STEPS * PROMPTS * GROUP + 2 * PROMPTS
            assert all(version == sample["step"] for sample in shown for _, version, _ in sample["spans"])
            sessions.append({sample["sample"].partition("/")[2]: sample for sample in shown})
        # The same sessions, each with as many turns of either policy, and the truth of the verifier's last verdict.
        assert sessions[0].keys() == sessions[1].keys()
        for name, solved in sessions[0].items():
            judged = sessions[1][name]
            assert solved["turns"] == judged["turns"]
            assert solved["reward"] in {0.0, 1.0}
            assert judged["reward"] in {0.0, 0.5, 1.0}
