"""A teacher that the same workers serve: each sample is scored once, whatever is killed."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import ROOT, Observer, black_box
from tests.support.small_job import GROUP, PROMPTS, check, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 6


def taught_job(teacher: Path) -> dict[str, Any]:
    """Return a small job whose teacher is the model that it starts from, next to rewards."""
    job = small_job(STEPS)
    # What rewards alone have, without what says how groups of equal ones are treated.
    algorithm = {"group_size": GROUP, "teacher": {"model": "start", "coef": 0.1}}
    return {**job, "algorithm": algorithm, "models": {"start": {"model": str(teacher)}}}


def write_teacher(folder: Path) -> Path:
    """Write the model that the job starts from, as another one: a worker builds an engine to change between the two."""
    shutil.copytree(ROOT / "examples/countdown/base", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "teacher"}))
    return folder


@pytest.mark.parametrize(("reserved", "workers"), [(0, 1), (1, 2)])
def test_workers_generate_and_teach_through_kills(tmp_path: Path, reserved: int, workers: int) -> None:
    with black_box(tmp_path / "state", reserved=reserved, workers=workers) as box:
        spec = taught_job(write_teacher(tmp_path / "state" / "start"))
        job = box.submit(spec)
        teacher = f"{job}.start"
        with closing(Observer(box.redis_url, job)) as of_job, closing(Observer(box.redis_url, teacher)) as of_teacher:
            box.until_step(job, 1)
            for role in ("preemptible", "trainer", "manager"):
                box.until(
                    lambda: bool(box.get(f"/v1/jobs/{teacher}/audit")["in_flight"]),
                    "the teacher is asked",
                    every_s=0.01,
                )
                box.kill(role)
            box.until_completed(job)
            check(box, job, of_job, spec)
            of_teacher.close()
            audit = box.get(f"/v1/jobs/{teacher}/audit")
            assert of_teacher.check() == audit["requested"] == audit["delivered"] == STEPS * PROMPTS * GROUP
        assert not audit["dropped"]
        assert audit["in_flight"] == 0
        assert audit["tokens_generated"] == audit["tokens_delivered"] + sum(audit["tokens_regenerated"].values())
        # The teacher is the student's start: with the same tokens, both engines' log-probabilities are the same.
        kl = [row["kl"] for row in box.get(f"/v1/jobs/{job}/metrics") if "kl" in row]
        assert len(kl) == STEPS
        assert abs(kl[0]) < 1e-6 < kl[-1]
        (cost,) = box.get(f"/v1/jobs/{job}/cost")["models"]
        assert (cost["job_id"], cost["tokens"], cost["hours"] > 0) == (teacher, audit["tokens_generated"], True)
