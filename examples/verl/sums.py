"""Sums of two numbers for verl: the reward, the data, and the model.

python examples/verl/sums.py sums   # of rlboost init: writes train.parquet, eval.parquet and model-verl
"""

from __future__ import annotations

import json
import re
import shutil
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
    """Write the folder's rows and model as verl needs them."""
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
    # verl looks for the end of a turn by the name that it has in each family of models: this one is a Qwen3.
    shutil.copytree(folder / "model", folder / "model-verl", dirs_exist_ok=True)
    for file in (folder / "model-verl").glob("tokenizer*.json"):
        file.write_text(file.read_text(encoding="utf-8").replace("<eos>", "<|im_end|>"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
