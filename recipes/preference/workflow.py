"""SFT, a reward model, and iterations of online DPO, one after the other: `python workflow.py`, after `rlboost up`.

At the end it prints the win rate of each iteration: how often an answer to a held-out prompt has a higher score of the
reward model than one before the first iteration. A tie is half a win.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from rlboost.shared.job.run_record import samples_path, unpack_groups

RLBOOST = (sys.executable, "-m", "rlboost")
MODEL = ".rlboost/runs/{}/model"


def main() -> None:
    """Run the three jobs."""
    sft = run("warmup.yaml")
    reward = run("reward_model.yaml")
    job = run("job.yaml", f"model={MODEL.format(sft)}", f"reward.model={MODEL.format(reward)}")
    for iteration, rate in enumerate(win_rates(Path(".rlboost/runs") / job), 1):
        print(f"win rate after iteration {iteration}: {rate:.3f}")


def run(file: str, *overrides: str) -> str:
    """Run a job to its end; return its id."""
    created = subprocess.run([*RLBOOST, "run", file, *overrides, "--json"], stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own
    job = str(json.loads(created.stdout)["id"])
    subprocess.run([*RLBOOST, "follow", job], check=True)  # noqa: S603 - our own
    return job


def win_rates(folder: Path) -> list[float]:
    """Return the win rate of each evaluation of a run against the first one, by the samples of its record."""
    scores: list[dict[int, list[float]]] = []
    while (file := folder / samples_path(len(scores))).exists():
        groups = unpack_groups(file.read_bytes())
        evaluated = [group for group in groups if group["group"].startswith("e")]
        scores.append({group["row"]: [one["reward"] for one in group["samples"]] for group in evaluated})
    first, *later = scores
    return [
        fmean((new > old) + 0.5 * (new == old) for row in first for old in first[row] for new in one.get(row, ()))
        for one in later
    ]


if __name__ == "__main__":
    main()
