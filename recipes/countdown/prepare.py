"""Write `train.jsonl` and `eval.jsonl` to the current folder: `python prepare.py [FOLDER]`.

FOLDER: a copy of the dataset; without it, Hugging Face datasets downloads `Jiayi-Pan/Countdown-Tasks-3to4`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlboost.recipes import write_rows

N_EVAL = 1024
ASK = (
    "Using the numbers {nums}, create an equation that equals {target}. You can use +, -, * and /, and each number "
    "exactly once. Think first, then write the equation within <answer> </answer>, such as "
    "<answer>(1 + 2) / 3</answer>."
)


def row(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a problem, which has `target` and `nums`."""
    columns = {"nums": list(given["nums"]), "target": given["target"]}
    return {"prompt": [{"role": "user", "content": ASK.format(**columns)}], **columns}


def main(source: str = "Jiayi-Pan/Countdown-Tasks-3to4") -> None:
    """Write the two files; held out are the first problems."""
    from datasets import load_dataset  # noqa: PLC0415 - tests of `row` do without it

    rows = map(row, load_dataset(source, split="train"))
    write_rows(Path("eval.jsonl"), islice(rows, N_EVAL))
    write_rows(Path("train.jsonl"), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
