"""Write the data of all jobs to the current folder: `python prepare.py [FOLDER]`.

FOLDER: a copy of the dataset; without it, Hugging Face datasets downloads `trl-lib/ultrafeedback_binarized`. A third of
its training rows are answers to imitate, a third pairs, and a third prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlboost.recipes import write_rows

Rows = Sequence[Mapping[str, Any]]


def files(train: Rows, held_out: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each file, of conversations in `chosen` and `rejected`."""
    third = len(train) // 3
    return {
        "sft.jsonl": [{"messages": row["chosen"]} for row in train[:third]],
        "pairs.jsonl": [pair(row) for row in train[third : 2 * third]],
        "prompts.jsonl": [{"prompt": row["chosen"][:-1]} for row in train[2 * third :]],
        "eval_pairs.jsonl": [pair(row) for row in held_out],
        "eval.jsonl": [{"prompt": row["chosen"][:-1]} for row in held_out],
    }


def pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a pair."""
    return {name: row[name] for name in ("chosen", "rejected")}


def main(source: str = "trl-lib/ultrafeedback_binarized") -> None:
    """Write the five files."""
    from datasets import load_dataset  # noqa: PLC0415 - tests of `files` do without it

    train, held_out = (list(load_dataset(source, split=split)) for split in ("train", "test"))
    for name, rows in files(train, held_out).items():
        write_rows(Path(name), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
