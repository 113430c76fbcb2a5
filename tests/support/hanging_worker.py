"""A rollout worker whose engine's thread, once it has made some tokens, waits for ever inside a native call.

It is the real process in all else: `python -m tests.support.hanging_worker` takes the settings of a worker.
"""

from __future__ import annotations

import os
import threading

from rlboost.services.rollout_worker.__main__ import main
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine
from rlboost.services.rollout_worker.settings import Settings
from rlboost.shared.process.lifecycle import run_service

HANGS_AFTER_TOKENS = 40

_round = TorchEngine._round


def _round_or_hang(engine: TorchEngine) -> None:
    if engine.stats().tokens_generated_total >= HANGS_AFTER_TOKENS:
        threading.Event().wait()
    _round(engine)


if __name__ == "__main__":
    TorchEngine._round = _round_or_hang  # type: ignore[method-assign, assignment]  # a function for a method
    os._exit(run_service("rollout_worker", Settings, main))
