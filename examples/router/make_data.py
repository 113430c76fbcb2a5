"""Write `train.jsonl` and `eval.jsonl` to the folder of this file: `python make_data.py`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

N_TRAIN, N_EVAL = 256, 32


def main(folder: Path) -> None:
    """Write sums of one digit and sums of two digits, in equal numbers; the same bytes every time."""
    rng = Random(0)
    easy = [(a, b) for a in range(10) for b in range(10)]
    hard = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(easy)
    rng.shuffle(hard)
    half = N_EVAL // 2
    held_out = [*easy[:half], *hard[:half]]
    train = [rng.choice(easy[half:] if i % 2 else hard[half:]) for i in range(N_TRAIN)]
    for name, problems in (("train", train), ("eval", held_out)):
        rows = ({"prompt": f"{a}+{b}>", "answer": str(a + b)} for a, b in problems)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(__file__).parent)
