"""Environments that wait, in a module that imports no more than a user's would."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from rlboost.environments import Step

ANSWER = "a" * 2_000


class Async:
    """Waits as a tool does that is called over the network."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.heard = list[str]()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.row, self.seed = row, seed
        return str(os.getpid())  # the benchmark looks at this process

    async def step(self, text: str) -> Step:
        self.heard.append(text)
        await asyncio.sleep(self.seconds)
        return Step(ANSWER, 1.0)


class Plain(Async):
    """Waits in its thread."""

    def step(self, text: str) -> Step:  # type: ignore[override]
        self.heard.append(text)
        time.sleep(self.seconds)
        return Step(ANSWER, 1.0)
