"""Whether a solver and a verifier learn together while each process that they need is killed once.

    OMP_NUM_THREADS=1 python -m benchmarks.team [--seeds 0,1,2] [--steps 16]

Runs examples/team/job.yaml with each seed by real processes: two trainers and two spot workers. The solver's trainer,
the verifier's, the manager and a worker are killed, each while samples are generated.

One JSON line for each seed and policy: its rewards in training and held out, by step, and its samples. A sample that is
lost or delivered twice, a token that is not of the worker or version that its sample names, and a version that is not
that of the step end the benchmark with an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import yaml

from tests.support.black_box import ROOT, BlackBox, Observer, black_box

LIMIT_S = 2 * 3600.0


def run(box: BlackBox, seed: int, steps: int) -> list[dict[str, Any]]:
    """Run the job; return a row for each policy."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/team/job.yaml").read_text())
    spec["trainer"] |= {"seed": seed, "checkpoint_every": 4}
    solver = box.submit({**spec, "steps": steps})
    jobs = [solver, f"{solver}.verifier"]
    with ExitStack() as stack:
        observers = [stack.enter_context(closing(Observer(box.redis_url, job))) for job in jobs]
        for number, victim in enumerate((*jobs, "manager", "preemptible"), 1):
            box.until_step(solver, number * steps // 6, LIMIT_S)
            if not box.until_busy(solver):
                raise RuntimeError("the job was done before the last kill")
            if victim in jobs:
                box.kill_trainer_of(victim)
            else:
                box.kill(victim)
        for job in jobs:
            box.until_completed(job, LIMIT_S)
    return [row(box, seed, job, observer) for job, observer in zip(jobs, observers, strict=True)]


def row(box: BlackBox, seed: int, job: str, observer: Observer) -> dict[str, Any]:
    """Return what became of a policy."""
    n = observer.check()
    audit = box.get(f"/v1/jobs/{job}/audit")
    if any(step != version for step, version in observer.versions()):
        raise RuntimeError(f"{job}: tokens of another version than that of their step")
    if audit["dropped"] or audit["in_flight"] or not audit["requested"] == audit["delivered"] == n:
        raise RuntimeError(f"{job}: {n} samples were seen: {audit}")
    metrics = box.get(f"/v1/jobs/{job}/metrics")
    curves = {
        name: {one["step"]: round(one[name], 3) for one in metrics if name in one}
        for name in ("reward/mean", "eval/reward_mean")
    }
    samples = {"requested": audit["requested"], "delivered": audit["delivered"], "dropped": audit["dropped"]}
    tokens = {name: audit[name] for name in ("tokens_generated", "tokens_saved", "tokens_regenerated")}
    about = {"seed": seed, "policy": job.partition(".")[2] or "solver"}
    return {**about, **curves, **samples, **tokens}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=16)
    asked = parser.parse_args()
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder, black_box(Path(folder, "state"), trainers=2, workers=2) as box:
            for found in run(box, seed, asked.steps):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
