"""A manager with OpenAI's routes over a fake bus, and simulated workers that generate all the time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
from openai import AsyncOpenAI

from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.ports import ModelFiles
from rlboost.services.rollout_manager.serving.routes import add_openai_routes, error_format
from rlboost.services.rollout_manager.settings import Settings
from tests.support.manager_fakes import FakeTokenizer, InlineTextProcessor
from tests.support.serving_rig import Rig

TOKEN = "secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Site(Rig):
    """A manager with its HTTP routes, whose workers generate all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.files = ModelFiles("m", tokenizer=FakeTokenizer(), stop_token_ids=(2,))
        self.not_found: Exception | None = None
        """Why there is no model's folder."""
        self.finding_s = 0.0
        """How long it takes to find one."""

        async def find(_: str, model: str) -> str:
            await asyncio.sleep(self.finding_s)
            if self.not_found:
                raise self.not_found
            return model

        def load(_: str) -> ModelFiles:
            return self.files

        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(
                build(
                    self.manager,
                    self.bus,
                    Settings(token=TOKEN),
                    [
                        partial(
                            add_openai_routes,
                            find_model_folder=find,
                            load_model_files=load,
                            text=InlineTextProcessor(load),
                        )
                    ],
                    error_format,
                )
            ),
            base_url="http://manager",
        )

    def client(self, api_key: str = TOKEN) -> AsyncOpenAI:
        http: Any = self.http  # it names the type by another module of httpx
        return AsyncOpenAI(base_url="http://manager/v1", api_key=api_key, http_client=http, max_retries=0)

    async def generate(self) -> None:
        while True:
            await self.work()
            await asyncio.sleep(0)

    def requested(self) -> int:
        return self.manager.world.jobs["j"].audit.serving.requested

    def answer(self, *answers: list[int]) -> None:
        """Have the next samples have these tokens, the last of which is a stop token."""
        (worker,) = self.workers.values()
        worker.answers += answers


@contextlib.asynccontextmanager
async def running_site(*workers: str) -> AsyncIterator[Site]:
    """Yield a site with workers, two by default."""
    site = Site()
    await site.start(*(workers or ("a", "b")))
    generating = asyncio.create_task(site.generate(), name="generate")
    try:
        yield site
    finally:
        generating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await generating
        await site.http.aclose()
