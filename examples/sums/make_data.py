"""Write `train.jsonl`, `eval.jsonl` and `warmup.jsonl` to the folder of this file: `python make_data.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

FILES = ("train.jsonl", "eval.jsonl", "warmup.jsonl")
N_TRAIN = 2560
N_EVAL = 128
N_WARMUP = 16_000
WARMUP_RIGHT = 0.5
"""Share of the warm-up's answers that are right: the model learns the form, and leaves the rest to the reward."""


def main(folder: Path) -> None:
    """Write the three files; the same bytes every time."""
    rng = Random(0)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(problems)
    held_out, train = problems[:N_EVAL], problems[N_EVAL:]
    write(folder / "eval.jsonl", (row(a, b) for a, b in held_out))
    write(folder / "train.jsonl", (row(a, b) for a, b in train[:N_TRAIN]))
    write(folder / "warmup.jsonl", warmup(train, rng))


def row(a: int, b: int) -> dict[str, str]:
    """Return a problem: the prompt, and a column for the reward function."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def warmup(problems: list[tuple[int, int]], rng: Random) -> Iterator[dict[str, str]]:
    """Yield rows to imitate: a prompt and an answer, which is right in half of them."""
    for _ in range(N_WARMUP):
        a, b = rng.choice(problems)
        slip = 0 if rng.random() < WARMUP_RIGHT else rng.choice([-20, -10, -2, -1, 1, 2, 10, 20])
        yield {"prompt": f"{a}+{b}=", "answer": str(abs(a + b + slip))}


def write(file: Path, rows: Iterator[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent)
