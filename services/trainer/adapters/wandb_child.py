"""`python -m rlboost.services.trainer.adapters.wandb_child`: one Weights & Biases run, in its own process.

Standard input has lines of JSON: the arguments of `wandb.init`, then one row per line, then `null`. `STARTED` on
standard output means that the run has started. If the input ends without `null`, the trainer has died; the child still
sends all rows.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

STARTED = "started"
_FINISH_LIMIT_S = 60.0
"""Limit for sending the remaining rows. No process waits for this one, so it must not stay forever."""


def main(lines: TextIO, answers: TextIO) -> int:
    """Run the child; return its exit code."""
    import wandb  # noqa: PLC0415 - an extra

    run: Any = wandb.init(
        **json.loads(lines.readline()),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_LIMIT_S),
    )
    print(STARTED, file=answers, flush=True)
    for line in lines:
        if (row := json.loads(line)) is None:
            run.finish()
            return 0
        run.log(row["metrics"], step=row["step"])
    run.finish(exit_code=1)
    return 0


if __name__ == "__main__":
    # Other output of the library must not be read as `STARTED`.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, channel))
