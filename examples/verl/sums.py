"""Sums of two numbers for verl: the reward, and the data.

python examples/verl/sums.py sums   # of rlboost init: writes train.parquet and eval.parquet
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pyarrow import Table, parquet


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1 if a completion begins with the answer."""
    del data_source, extra_info
    found = re.match(r"\s*(\d+)", solution_str)
    return float(found is not None and found[1] == ground_truth)


def main(folder: Path) -> None:
    """Write the folder's rows in verl's format."""
    for name in ("train", "eval"):
        rows = map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
        found = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
                "extra_info": {"index": i},
            }
            for i, row in enumerate(rows)
        ]
        parquet.write_table(Table.from_pylist(found), folder / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
