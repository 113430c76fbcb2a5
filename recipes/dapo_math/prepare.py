"""Write `train.jsonl` and `eval.jsonl` to the current folder: `python prepare.py [FOLDER FOLDER]`.

FOLDERs: copies of the two datasets; without them, Hugging Face datasets downloads `BytedTsinghua-SIA/DAPO-Math-17k` and
`BytedTsinghua-SIA/AIME-2024`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost.recipes import distinct, write_rows


def question(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row: the published file has most of them a hundred times."""
    prompt: str = row["prompt"][-1]["content"]
    return prompt


def main(train: str = "BytedTsinghua-SIA/DAPO-Math-17k", held_out: str = "BytedTsinghua-SIA/AIME-2024") -> None:
    """Write the two files."""
    from datasets import load_dataset  # noqa: PLC0415 - tests of `question` do without it

    for source, name in ((train, "train.jsonl"), (held_out, "eval.jsonl")):
        write_rows(Path(name), distinct(load_dataset(source, split="train"), question))


if __name__ == "__main__":
    main(*sys.argv[1:])
