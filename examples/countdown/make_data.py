"""Write `train.jsonl` and `eval.jsonl`: `python -m rlboost.examples.countdown.make_data`. The same bytes every time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from rlboost.examples.countdown.task import RL_OPERATORS, Problem, all_problems, training_problems

N_TRAIN = 2560
"""80 steps of 32 prompts without seeing one twice; 3,684 different ones exist."""
_SEED = 0


def train_problems() -> list[Problem]:
    """Return the training problems: random draws, each prompt once, in the order drawn."""
    rng = Random(_SEED)  # noqa: S311 - data, not secrets
    chosen: dict[Problem, None] = {}
    for problem in training_problems(rng, RL_OPERATORS):
        chosen.setdefault(problem)
        if len(chosen) == N_TRAIN:
            break
    return list(chosen)


def eval_problems() -> list[Problem]:
    """Return every held-out problem that the training problems' operators can solve, once, digits and order mixed."""
    rng = Random(_SEED)  # noqa: S311 - data, not secrets
    problems = [problem for problem in all_problems(RL_OPERATORS) if problem.is_held_out]
    rng.shuffle(problems)
    mixed = []
    for problem in problems:
        first, second, third = rng.sample(problem.numbers, 3)
        mixed.append(Problem((first, second, third), problem.target))
    return mixed


def to_jsonl(name: str, problems: Iterable[Problem]) -> str:
    """Return one line a problem: its id, the prompt's text, and the columns that the reward reads."""
    return "".join(
        json.dumps({"id": f"{name}-{i}", "prompt": p.prompt, "numbers": p.numbers, "target": p.target}) + "\n"
        for i, p in enumerate(problems)
    )


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write Countdown's training and evaluation problems.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder to write to")
    out: Path = parser.parse_args().out
    (out / "train.jsonl").write_text(to_jsonl("train", train_problems()), encoding="utf-8")
    (out / "eval.jsonl").write_text(to_jsonl("eval", eval_problems()), encoding="utf-8")


if __name__ == "__main__":
    main()
