"""A trainer and a worker whose devices are emulated: `python -m benchmarks.support.emulated trainer|worker`.

They are the real processes in all else, and compute what they always do. But a call of the trainer's engine takes as
long as a device would that all trainers of this machine share: it holds a lock of the machine, for a time that depends
on its tokens only. Moving the state to the host or back takes `CHANGE_S`. A decode step of the worker takes `DECODE_S`,
whatever its batch: memory-bound decoding. So figures depend little on how busy this machine's CPUs are.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

LOCK, TOKEN_S, CHANGE_S, DECODE_S = (f"BENCHMARK_{name}" for name in ("LOCK", "TOKEN_S", "CHANGE_S", "DECODE_S"))
"""Variables: file of the device's lock, seconds that it trains a token, offloads or onloads, and decodes a step."""


class EmulatedDevice:
    """An engine of a trainer, on a device that it shares with those of other processes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = Path(os.environ[LOCK]).open("wb")  # noqa: SIM115 - as long as the process
        self._token_s, self._change_s = float(os.environ[TOKEN_S]), float(os.environ[CHANGE_S])
        self._is_offloaded = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def _busy(self, seconds: float) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        began = time.monotonic()
        try:
            yield
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def accumulate(self, batches: Sequence[Sequence[Any]], loss: Any) -> Any:
        n_tokens = sum(row.n_tokens for rows in batches for row in rows)
        onload_s = self._change_s if self._is_offloaded else 0.0
        self._is_offloaded = False
        with self._busy(n_tokens * self._token_s + onload_s):
            return self._inner.accumulate(batches, loss)

    def offload(self) -> None:
        if not self._is_offloaded and os.environ.get("RLBOOST_TRAINER_SHARED_DEVICE"):
            self._is_offloaded = True
            with self._busy(self._change_s):
                self._inner.offload()


def _trainer() -> int:
    from rlboost.services.trainer import __main__ as service  # noqa: PLC0415 - one of the two
    from rlboost.services.trainer import build as composition  # noqa: PLC0415 - likewise
    from rlboost.services.trainer.settings import Settings  # noqa: PLC0415 - likewise
    from rlboost.shared.process.lifecycle import run_service  # noqa: PLC0415 - likewise

    build = composition.build_resources

    def building(*args: Any, **named: Any) -> Any:
        made = build(*args, **named)
        engine = EmulatedDevice(made.engine)
        return replace(made, engine=engine)

    composition.build_resources = building
    return run_service("trainer", Settings, service.main)


def _worker() -> int:
    from rlboost.services.rollout_worker.__main__ import main  # noqa: PLC0415 - one of the two
    from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: PLC0415 - likewise
    from rlboost.services.rollout_worker.settings import Settings  # noqa: PLC0415 - likewise
    from rlboost.shared.process.lifecycle import run_service  # noqa: PLC0415 - likewise

    decode_s, round_of = float(os.environ[DECODE_S]), TorchEngine._round  # noqa: SLF001 - what is emulated

    def slow(engine: TorchEngine) -> None:
        began = time.perf_counter()
        engine._clock = time.perf_counter  # noqa: SLF001 - the manager is told how long it takes
        round_of(engine)
        time.sleep(max(0.0, began + decode_s - time.perf_counter()))

    TorchEngine._round = slow  # type: ignore[method-assign, assignment]  # noqa: SLF001 - a function for a method
    return run_service("rollout_worker", Settings, main)


if __name__ == "__main__":
    runs: dict[str, Callable[[], int]] = {"trainer": _trainer, "worker": _worker}
    os._exit(runs[sys.argv.pop()]())  # the service takes no arguments
