"""An environment and an agent that ask a priced model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rlboost.agents import Session
from rlboost.environments import BudgetSpent, PricedModel, Step


def dear(url: str, budget: float) -> PricedModel:
    return PricedModel(url=url, model="dear", input_price=10.0, output_price=30.0, budget=budget, max_tokens=20)


class Endless(PricedModel):
    """Ends the process or hangs where others send a call."""

    async def _ask(self, body: bytes) -> Any:
        if b"crash" in body:
            os._exit(3)
        await asyncio.Event().wait()


class Sums:
    """Asks for each word that is a sum.

    `die` ends the process once; `crash` ends it during a call, which `hang` never ends; `handled` makes a spent budget
    an answer.
    """

    def __init__(self, url: str, budget: float = 1.0, dies: str = "") -> None:
        self.model = dear(url, budget)
        self.dies = dies

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin with the row's prompt."""

    async def step(self, text: str) -> Step:
        words = text.split()
        try:
            async with asyncio.TaskGroup() as calls:
                asked = [
                    calls.create_task(self.model(word)) for word in words if "+" in word and words[0] == "together"
                ]
            answers = [await task for task in asked] or [await self.model(word) for word in words if "+" in word]
        except BudgetSpent:
            if "handled" not in words:
                raise
            answers = ["no money"]
        if words[0] in {"crash", "hang"}:
            await Endless(**vars(self.model))(words[0])
        if "die" in words:
            die_once(Path(self.dies))
        return Step(" ".join(answers))


def die_once(file: Path) -> None:
    if not file.exists():
        file.touch()
        os._exit(3)


async def agent(session: Session, row: dict[str, Any], url: str, budget: float) -> float:
    return float(await dear(url, budget)("1+2"))


class Early(Sums):
    """Asks before the first turn."""

    def __init__(self) -> None:
        super().__init__("http://unused/v1")

    async def reset(self, row: dict[str, Any], seed: int) -> None:  # type: ignore[override]
        """Ask for the prompt."""
        await self.model("1+2")
