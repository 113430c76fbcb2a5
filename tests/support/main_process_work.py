"""One of the processes of a trainer whose main process works for all: below torchrun, without arguments."""

from __future__ import annotations

import json
import os
import time

from accelerate import Accelerator

from rlboost import trl
from rlboost.shared.errors import ConfigError


def _rank_after_a_while() -> str:
    time.sleep(1.0)  # five times as long as one collective waits
    return os.environ["RANK"]


def _fails() -> None:
    raise ConfigError("top_k: is not supported")


def main() -> None:
    """Print what this process gets, and which error."""
    trl._NEWS_S = 0.2
    accelerator = Accelerator(cpu=True)
    made = trl._by_main(accelerator, _rank_after_a_while)
    try:
        trl._by_main(accelerator, _fails)
    except Exception as error:  # noqa: BLE001 - of any kind
        line = {"rank": accelerator.process_index, "made": made, "error": f"{type(error).__name__}: {error}"}
        os.write(1, (json.dumps(line) + "\n").encode())
    accelerator.end_training()


if __name__ == "__main__":
    main()
