"""Write traces to imitate: `python -m rlboost.examples.countdown.make_traces --out traces.jsonl`.

Each row has a `prompt` and a `completion`, as jobs of `kind: sft` take them; the same arguments give the same bytes.
A trace rarely has a hit, and without sure verdicts reinforcement learning takes off slowly, so a share of the rows
start after an attempt that is one: their completion is the verdict and the answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from rlboost.examples.countdown.task import ALL_OPERATORS, HIT, noisy_trace, training_problems

N_ROWS = 64_000
"""1,000 steps of 64 rows without seeing one twice."""
HITS = 0.1
"""Share of the rows that start after a hit."""


def traces(hits: float, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows without end, of problems that are not held out.

    Args:
        hits: share of rows that start after an attempt that reaches the target.
        seed: of the problems and their traces.

    """
    rng = Random(seed)  # noqa: S311 - data, not secrets
    problems = training_problems(rng, ALL_OPERATORS)
    while True:
        if rng.random() >= hits:
            problem = next(problems)
            yield {"prompt": problem.prompt, "completion": noisy_trace(problem, rng)}
            continue
        trace = ""
        while HIT not in trace:
            problem = next(problems)
            trace = noisy_trace(problem, rng, blurt_probability=0.0, quit_probability=0.1)
        start = trace.index(HIT)
        yield {"prompt": problem.prompt + trace[:start], "completion": trace[start:]}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write traces for a warm-up of Countdown.")
    parser.add_argument("--rows", type=int, default=N_ROWS)
    parser.add_argument("--hits", type=float, default=HITS, help="share of the rows that start after a hit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    asked = parser.parse_args()
    with asked.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in islice(traces(asked.hits, asked.seed), asked.rows))


if __name__ == "__main__":
    main()
