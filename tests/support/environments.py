"""Environments as users write them, good and bad. What goes wrong is in the row's column `does`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rlboost.environments import Said, Step, ToolEnvironment


class Game:
    """Asks for `n` turns and rewards each by the length of what it hears."""

    def __init__(self, n: int = 2) -> None:
        self.n = n
        self.heard: list[str] = []

    def reset(self, row: dict[str, Any], seed: int) -> Said | None:
        self.row, self.seed = row, seed
        match row.get("does"):
            case "raise at once":
                raise ValueError("not today")
            case "begin":
                return f"seed {seed}"
        return None

    def step(self, text: str) -> Step:
        self.heard.append(text)
        match self.row.get("does"):
            case "hang":
                Path(self.row["file"]).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
                time.sleep(3600)
            case "raise":
                raise ValueError("I do not like this")
            case "exit":
                os._exit(3)
            case "exit once" if len(self.heard) == 2 and not Path(self.row["file"]).exists():
                Path(self.row["file"]).touch()
                os._exit(3)
            case "forget":
                return 7  # type: ignore[return-value]
            case "nan":
                return Step(reward=float("nan"))
            case "object":
                return Step([{"content": "no role"}])
            case "print":
                print("to standard output", flush=True)
        return Step(f"{len(self.heard)}:{text}", float(len(text)), done=len(self.heard) >= self.n)


class Later(Game):
    async def reset(self, row: dict[str, Any], seed: int) -> Said | None:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().reset(row, seed)

    async def step(self, text: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(text)


class Closing(Game):
    """Writes down that it was closed."""

    def close(self) -> None:
        if hasattr(self, "row"):
            with Path(self.row["file"]).open("a") as file:
                file.write(f"{self.heard}\n")


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
