"""`python -m services.trainer.adapters.log.wandb_child`: one run of Weights & Biases, in a process of its own.

On standard input come lines of JSON: what the run is, then a row a line, then `null`. A word on standard output says
that the run has begun. Input that ends without `null` is a trainer that died; then, too, what came is sent.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

BEGUN = "begun"
_FINISH_LIMIT_S = 60.0
"""For what is not sent when there is no more: nobody waits for this process, and it must not stay for ever."""


def main(lines: TextIO, answers: TextIO) -> int:
    """Run it; return the exit code."""
    import wandb  # noqa: PLC0415 - an extra

    run: Any = wandb.init(
        **json.loads(lines.readline()),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_LIMIT_S),
    )
    print(BEGUN, file=answers, flush=True)
    for line in lines:
        if (row := json.loads(line)) is None:
            run.finish()
            return 0
        run.log(row["metrics"], step=row["step"])
    run.finish(exit_code=1)
    return 0


if __name__ == "__main__":
    # Whatever else is printed must not be taken for an answer.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, channel))
