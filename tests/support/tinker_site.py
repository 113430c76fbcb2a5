"""A server of Tinker's API with a tiny model, on a fleet that samples nothing real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from rlboost.fleet import Group, Sample
from rlboost.publishing import Weights
from rlboost.tinker.model import LoraModel
from rlboost.tinker.routes import create_app
from rlboost.tinker.server import Tinker
from tests.support.model_folder import write_model

NAME = "tiny"
COST = {
    "dollars": 3.0,
    "dollars_per_million_tokens": 6.0,
    "workers": [{"role": "preemptible", "dollars": 2.0}, {"role": "trainer", "dollars": 1.0}],
}
"""Of two thirds of 6 dollars, which workers have cost."""


class FakeFleet:
    """A fleet whose samples are the number of their version, again and again."""

    def __init__(self) -> None:
        self.job_id, self.version, self.is_adapter = "tinker-1", -1, False
        self.published: list[Weights] = []
        self.asked: list[tuple[int, Mapping[str, Any]]] = []
        """Version and options of each call of `generate`."""
        self.released: list[int] = []
        self.dropped = ""
        self.go = asyncio.Event()
        """Samples end once it is set."""
        self.go.set()

    async def __aenter__(self) -> FakeFleet:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def publish(self, weights: Weights) -> int:
        self.published.append(weights)
        self.version, self.is_adapter = self.version + 1, bool(weights.adapter)
        return self.version

    async def checkpointed(self, *, step: int) -> None:
        self.released.append(step)

    async def generate(self, prompts: Sequence[Sequence[int]], *, n: int, **options: Any) -> AsyncIterator[Group]:
        version = self.version
        self.asked.append((version, {"n": n, **options}))
        await self.go.wait()
        assert self.version == version, "other weights were published while samples were in flight"
        tokens = [version] * 3
        found = [] if self.dropped else [Sample(tokens, [-1.0, -2.0, -0.5], "stop", [("w", version, 3)], 1)] * n
        for i in range(len(prompts)):
            yield Group(i, found, [self.dropped] * n if self.dropped else [])


class Site:
    """The server's parts."""

    def __init__(self, folder: Path, *, api_key: str = "", price_per_hour: float = 0.0) -> None:
        path = folder / "model"
        if not path.exists():
            write_model(path)
        self.fleet, self.model = FakeFleet(), LoraModel(str(path), "cpu")
        client: Any = SimpleNamespace(jobs=SimpleNamespace(cost=lambda _: COST))
        fleet: Any = self.fleet
        self.tinker = Tinker(fleet, client, self.model, NAME, folder / "checkpoints", price_per_hour)
        self.app: FastAPI = create_app(self.tinker, api_key)
