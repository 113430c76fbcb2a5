"""`python -m benchmarks.support.watched_manager`: a manager that reports what holds its event loop up.

Each line of the file `WATCH_FILE` is JSON: when the loop ran nothing else (Unix seconds), for how long (`wall_ms`), the
processor time of its thread in it (`cpu_ms`, which other processes do not lengthen), how much of it the garbage
collector took (`gc_ms`), and where the thread was seen.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from rlboost.services.rollout_manager.__main__ import main
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.process.lifecycle import run_service

TICK_S = 0.002
REPORTED_S = 0.01
_PLACES = 4


class Watch:
    """Measures the times between two ticks of the event loop."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)
        self._thread_id = threading.get_ident()
        self._at = time.monotonic()
        self._seen: list[str] = []
        self._gc_s, self._gc_began_s = 0.0, 0.0
        gc.callbacks.append(self._on_gc)

    async def run(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()
        cpu_s = time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, now_cpu_s = time.monotonic(), time.thread_time()
            stall_s = now - self._at - TICK_S
            if stall_s > REPORTED_S:
                line = {
                    "at": round(time.time(), 3),
                    "wall_ms": round(stall_s * 1e3, 1),
                    "cpu_ms": round((now_cpu_s - cpu_s) * 1e3, 1),
                    "gc_ms": round(self._gc_s * 1e3, 1),
                    "places": self._seen,
                }
                self._file.write(json.dumps(line) + "\n")
            self._at, cpu_s, self._seen, self._gc_s = now, now_cpu_s, [], 0.0

    def _on_gc(self, phase: str, _: object) -> None:
        if threading.get_ident() != self._thread_id:
            return
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_began_s

    def _look(self) -> None:
        while True:
            time.sleep(REPORTED_S / 2)
            frames = sys._current_frames()  # noqa: SLF001 - the interpreter has no other way
            if time.monotonic() - self._at > REPORTED_S and (frame := frames.get(self._thread_id)):
                self._seen.append(_place(frame))


def _place(frame: FrameType | None) -> str:
    places = list[str]()
    while frame is not None and len(places) < _PLACES:
        code = frame.f_code
        if "/asyncio/" not in code.co_filename:
            places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


async def _watched(config: Settings, stop: asyncio.Event) -> None:
    watching = asyncio.create_task(Watch(Path(os.environ["WATCH_FILE"])).run(), name="watch")
    try:
        await main(config, stop)
    finally:
        watching.cancel()


if __name__ == "__main__":
    sys.exit(run_service("rollout_manager", Settings, _watched))
