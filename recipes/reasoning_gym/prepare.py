"""Write `train.jsonl` and `eval.jsonl` with problems of reasoning-gym to the current folder. Downloads nothing.

python prepare.py gsm_symbolic chain_sum countdown
python prepare.py 'spell_backward={"min_word_len": 3, "max_word_len": 6}' --text --size 16000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlboost.recipes import distinct, write_rows

TASKS = ("gsm_symbolic", "chain_sum", "countdown")
ASK = "Think step by step, and put the final answer, and nothing else, between <answer> and </answer>."

HELD_OUT_SEED = 1_000_000_000
"""Far from that of the training problems: many tasks draw problem i with the seed plus i."""


def rows(task: str, size: int, seed: int, *, text: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task, which may have a configuration: `chain_sum={"max_terms": 2}`."""
    import reasoning_gym  # noqa: PLC0415 - takes seconds

    name, _, given = task.partition("=")
    for entry in reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(given or "{}")):
        chat = [{"role": "user", "content": f"{entry['question']}\n\n{ASK}"}]
        yield {"prompt": entry["question"] if text else chat, "task": name, **entry}


def main() -> None:
    """Write the two files, each question once; no training problem is held out, too."""
    parser = argparse.ArgumentParser(description="Write problems of reasoning-gym.")
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="TASK[=JSON]", help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--size", type=int, default=4000, help="training problems of each task")
    parser.add_argument("--held-out", type=int, default=200, help="held-out problems of each task")
    parser.add_argument("--text", action="store_true", help="bare questions, for a model without a chat template")
    asked = parser.parse_args()
    seen: set[str] = set()
    for file, size, seed in (("eval.jsonl", asked.held_out, HELD_OUT_SEED), ("train.jsonl", asked.size, 0)):
        made = (row for task in asked.tasks for row in rows(task, size, seed, text=asked.text))
        write_rows(Path(file), distinct(made, itemgetter("question"), seen))


if __name__ == "__main__":
    main()
