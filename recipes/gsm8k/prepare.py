"""Write `train.jsonl` and `eval.jsonl` to the current folder: `python prepare.py [FOLDER]`.

FOLDER: a copy of the dataset; without it, Hugging Face datasets downloads `openai/gsm8k`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost.recipes import write_rows

ASK = "Think step by step, and put the final answer within \\boxed{}."


def row(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a problem, which has `question` and `answer`; the reward reads what follows `####`."""
    return {"prompt": [{"role": "user", "content": f"{given['question']}\n{ASK}"}], "answer": given["answer"]}


def main(source: str = "openai/gsm8k") -> None:
    """Write the two files."""
    from datasets import load_dataset  # noqa: PLC0415 - tests of `row` do without it

    for split, name in (("train", "train.jsonl"), ("test", "eval.jsonl")):
        write_rows(Path(name), map(row, load_dataset(source, "main", split=split)))


if __name__ == "__main__":
    main(*sys.argv[1:])
