"""The Countdown job from prompts to updates, by TRL, by a plain loop and by us, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

LIMIT_S = 1800


def rounds(n_rounds: int, steps: int) -> dict[str, Any]:
    """Run every contender in turn, `n_rounds` times; return medians per step, without each run's first step."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(n_rounds):
        for name, contender in _CONTENDERS.items():
            found.setdefault(name, []).append(contender(steps))
    if find_spec("trl") is None:
        del found["trl"]
    row: dict[str, Any] = {"benchmark": "trainer.end_to_end", "rounds": n_rounds, "steps": steps}
    for name, results in found.items():
        row[name] = {key: round(median(result[key] for result in results), 3) for key in results[0]}
    for other in ("trl", "plain"):
        for name in ("ours", "system"):
            if other in row:
                row[f"{other}_over_{name}"] = {key: round(row[other][key] / row[name][key], 2) for key in row[name]}
    return row


def _trl(steps: int) -> dict[str, float]:
    if find_spec("trl") is None:
        print("TRL is not installed: pip install -c constraints.txt -e '.[dev]'", file=sys.stderr)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return _step(_last_line("benchmarks.trainer.trl_job", "--steps", str(steps), "--folder", folder))


def _plain(steps: int) -> dict[str, float]:
    return _step(_last_line("benchmarks.trainer.plain_job", "--steps", str(steps)))


def _ours(steps: int) -> dict[str, float]:
    return _step(_last_line("benchmarks.trainer.own_job", "--steps", str(steps)))


def _system(steps: int) -> dict[str, float]:
    """Run `rlboost demo`: trainer, manager, weight store, Redis, a reserved and two spot engines, and evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        demo = ("demo", "--steps", str(steps), "--workers", "2", "--no-chaos", "--state", folder)
        _run("rlboost", *demo)
        [metrics] = Path(folder).glob("runs/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        record = json.loads((Path(folder) / "record.json").read_text())
    cpu_s = (sum(record["cpu_s"].values()) - record["cpu_to_start_s"]) / steps
    wall_s = median(row["time/step_s"] for row in rows[1:steps])
    return _figures(wall_s, cpu_s, record["audit"]["tokens_generated"] / steps)


_CONTENDERS = {"trl": _trl, "plain": _plain, "ours": _ours, "system": _system}


def _step(result: dict[str, Any]) -> dict[str, float]:
    wall, cpu = zip(*result["steps"][1:], strict=True)
    return _figures(median(wall), median(cpu), result["tokens"] / len(result["steps"]))


def _figures(wall_s: float, cpu_s: float, tokens: float) -> dict[str, float]:
    """Return what a step takes; the samples differ, so also what a thousand of their tokens take."""
    return {"wall_s": wall_s, "cpu_s": cpu_s, "tokens": tokens, "cpu_s_per_1k_tokens": 1000 * cpu_s / tokens}


def _last_line(module: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run(module, *arguments).splitlines()[-1])
    return found


def _run(module: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
