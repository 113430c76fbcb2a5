"""Samples until a student is as good as its teacher: by GRPO, and by distillation from a teacher on workers.

    OMP_NUM_THREADS=1 python -m benchmarks.distillation [--seeds 0,1,2] [--steps 60] [--teacher FOLDER]

All jobs train examples/countdown/base with real processes: a trainer and two spot workers. The teacher is the result
of the example's job, GRPO with 256 samples a step, unless one is given; `--grpo` repeats that job with each seed. A
student of `name: distill` has one sample for each of 32 prompts a step. A worker is killed in each student's third
step, while the teacher scores samples.

One JSON line for each job: held-out pass@1 by step, every five steps with 204 samples; the step and the samples after
which it was first the teacher's, where the job ends; and, of students, the audit of the teacher's samples until then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.support.black_box import ROOT, BlackBox, black_box

LIMIT_S = 4 * 3600.0
EVAL = {"every": 5, "samples": 204}
KILL_AT = 2
"""Step in which a worker is killed."""


def example(seed: int, steps: int) -> dict[str, Any]:
    """Return the example's job, evaluated more often."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/countdown/job.yaml").read_text())
    spec["trainer"]["seed"] = seed
    return {**spec, "steps": steps, "eval": EVAL}


def student(seed: int, steps: int, teacher: Path) -> dict[str, Any]:
    """Return the same job with a teacher on workers in the place of rewards."""
    algorithm = {"name": "distill", "group_size": 1, "updates_per_step": 2, "teacher": {"model": "teacher"}}
    return {**example(seed, steps), "algorithm": algorithm, "models": {"teacher": {"model": str(teacher)}}}


def run(box: BlackBox, spec: dict[str, Any], goal: float) -> dict[str, Any]:
    """Run a job until an evaluation reaches the goal, or to its end; return its row."""
    job = box.submit(spec)
    served, passed, audit = f"{job}.teacher", dict[int, float](), dict[str, Any]()
    if "models" in spec:
        box.until_step(job, KILL_AT, within_s=LIMIT_S)
        box.until(lambda: bool(box.get(f"/v1/jobs/{served}/audit")["in_flight"]), "the teacher scores", LIMIT_S)
        box.kill("preemptible")

    def is_over() -> bool:
        rows = [row for row in box.get(f"/v1/jobs/{job}/metrics") if "eval/pass@1" in row]
        passed.update({row["step"]: round(row["eval/pass@1"], 3) for row in rows})
        state = box.get(f"/v1/jobs/{job}")["state"]
        assert state not in {"failed", "cancelled"}, box.logs()
        return state == "completed" or max(passed.values(), default=0.0) >= goal

    box.until(is_over, f"{job} is over", LIMIT_S)
    if "models" in spec:
        found = box.get(f"/v1/jobs/{served}/audit")
        audit = {name: found[name] for name in ("requested", "delivered", "in_flight", "dropped", "tokens_regenerated")}
    if box.get(f"/v1/jobs/{job}")["state"] != "completed":
        box.command_job(job, "cancel")
    reached = next((step for step, value in passed.items() if value >= goal), None)
    per_step = spec["data"]["prompts_per_step"] * spec["algorithm"]["group_size"]
    samples = None if reached is None else reached * per_step
    about = {"algorithm": spec["algorithm"]["name"], "seed": spec["trainer"]["seed"], "goal": goal}
    return {**about, "reached_at": reached, "samples": samples, "pass@1": passed, "teacher": audit, "job": job}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--teacher", type=Path, help="folder of a trained model; by default GRPO trains one")
    parser.add_argument("--goal", type=float, help="its held-out pass@1; needed with --teacher")
    parser.add_argument("--grpo", action="store_true", help="run GRPO with each seed, too")
    asked = parser.parse_args()
    if asked.teacher and asked.goal is None:
        parser.error("--teacher needs --goal")
    with tempfile.TemporaryDirectory() as folder, black_box(Path(folder, "state"), reserved=0, workers=2) as box:
        if asked.teacher:  # trainers read what lies in the state folder
            teacher, goal = shutil.copytree(asked.teacher, box.state / "teacher"), asked.goal
        else:
            row = run(box, example(0, asked.steps), 2.0)
            teacher, goal = box.state / "runs" / row["job"] / "model", list(row["pass@1"].values())[-1]
            print(json.dumps({**row, "goal": goal}), flush=True)
        for seed in map(int, asked.seeds.split(",")):
            jobs = [student(seed, asked.steps, teacher)]
            for spec in jobs + [example(seed, asked.steps)] * asked.grpo:
                print(json.dumps(run(box, spec, goal)), flush=True)


if __name__ == "__main__":
    main()
