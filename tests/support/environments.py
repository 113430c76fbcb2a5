"""Environments as users write them, good and bad. What goes wrong is in the row's column `does`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlboost.environments import Message, Step, ToolEnvironment

BAD: dict[str, Any] = {
    "forget": 7,
    "nan": Step(reward=float("nan")),
    "huge": Step(reward=1e300),
    "no-reward": Step(reward=None),  # type: ignore[arg-type]
    "text-reward": Step(reward="1.0"),  # type: ignore[arg-type]
    "refund": Step(cost=-1.0),
    "text-done": Step(done="False"),  # type: ignore[arg-type]
    "object": Step([{"content": "no role"}]),
    "half a character": Step("\ud800"),
    "time": Step([{"role": "tool", "content": datetime.now(UTC)}]),
    "number": Step([{"role": "tool", 7: "content"}]),  # type: ignore[dict-item]  # what is wrong with it
}


class Game:
    """Asks for `n` turns and rewards each by the length of what it hears."""

    def __init__(self, n: int = 2) -> None:
        self.n = n
        self.heard: list[str] = []

    def reset(self, row: dict[str, Any], seed: int) -> Message | None:
        self.row, self.seed = row, seed
        match row.get("does"):
            case "raise at once":
                raise ValueError("not today")
            case "begin":
                return f"seed {seed}"
        return None

    def step(self, text: str) -> Any:
        self.heard.append(text)
        match self.row.get("does"):
            case "hang":
                Path(self.row["file"]).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
                time.sleep(3600)
            case "raise":
                raise ValueError("I do not like this")
            case "answer and leave":
                Path(self.row["file"]).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
                threading.Timer(0.2, os._exit, (3,)).start()
            case "exit":
                os._exit(3)
            case "exit once" if len(self.heard) == 2 and not Path(self.row["file"]).exists():
                Path(self.row["file"]).touch()
                os._exit(3)
            case "raise half a character":
                raise ValueError("\ud800")
            case "long text":
                return Step("a" * (17 << 20), 1.0, done=False)
            case str(bad) if bad in BAD:
                return BAD[bad]
            case "print":
                print("to standard output", flush=True)
        return Step(f"{len(self.heard)}:{text}", float(len(text)), done=len(self.heard) >= self.n)


class Later(Game):
    async def reset(self, row: dict[str, Any], seed: int) -> Message | None:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().reset(row, seed)

    async def step(self, text: str) -> Any:
        await asyncio.sleep(0.001)
        return super().step(text)


class Raw(Game):
    """Answers with the text that has special tokens."""

    def step(self, text: str, *, text_raw: str) -> Step:  # type: ignore[override]
        return Step(f"{text} of {text_raw}")


class Closing(Game):
    """Writes down that it was closed."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def reset(self, row: dict[str, Any], seed: int) -> Message | None:
        time.sleep(row.get("slow_s", 0.0))
        return super().reset(row, seed)

    def close(self) -> None:
        with Path(self.file).open("a") as file:
            file.write(f"{self.heard}\n")


class ClosingLater(Closing):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0.001)
        super().close()
        raise ValueError("nobody minds")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sums(ToolEnvironment):
    """Rewards an answer that has what is right in it."""

    def __init__(self) -> None:
        super().__init__([add])

    def score(self, text: str) -> float:
        return float(str(self.row["answer"]) in text)


class Silent:
    """No environment."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        pass
