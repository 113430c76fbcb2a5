"""Write `sft.jsonl`, `train.jsonl` and `eval.jsonl` to the current folder: `python prepare.py [FOLDER]`.

FOLDER: a copy of the dataset; without it, Hugging Face datasets downloads `openai/gsm8k`. The first half of its
training rows are solutions to imitate, the second half are problems for GRPO.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost.recipes import write_rows
from rlboost.recipes.gsm8k.prepare import row

_CALCULATION = re.compile(r"<<.*?>>")


def solution(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row to imitate: the solution without the marks of its calculator, and the answer in a box."""
    steps, _, answer = given["answer"].rpartition("####")
    text = f"{_CALCULATION.sub('', steps).strip()}\nThe answer is \\boxed{{{answer.strip()}}}."
    return {"prompt": row(given)["prompt"], "completion": [{"role": "assistant", "content": text}]}


def main(source: str = "openai/gsm8k") -> None:
    """Write the three files."""
    from datasets import load_dataset  # noqa: PLC0415 - tests of `solution` do without it

    given = list(load_dataset(source, "main", split="train"))
    half = len(given) // 2
    write_rows(Path("sft.jsonl"), map(solution, given[:half]))
    write_rows(Path("train.jsonl"), map(row, given[half:]))
    write_rows(Path("eval.jsonl"), map(row, load_dataset(source, "main", split="test")))


if __name__ == "__main__":
    main(*sys.argv[1:])
