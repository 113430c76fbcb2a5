"""The user's environments in processes of our own: they may hang, raise, print, or kill their process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgpack

from services.trainer.adapters.own_process import IMPORT_LIMIT_S, Ended, OwnProcess, Program
from services.trainer.ports_environment import Misbehaved, Opening, Reply
from shared.errors import ConfigError
from shared.reward import EnvironmentSpec
from shared.waiting import Waits

_DETAIL_CHARS = 500
_CLOSE_LIMIT_S = 5.0
"""A process gets so long to close the environments that it holds."""


class EnvironmentPool:
    """`Environments` over `environment.workers` processes; each answers one conversation at a time."""

    def __init__(self, spec: EnvironmentSpec, waits: Waits) -> None:
        """Prepare; `start` starts the processes."""
        self._waits = waits
        self._hosts = [_Host(spec) for _ in range(spec.workers)]
        self._host_of: dict[int, _Host] = {}

    async def start(self) -> None:
        """See `Environments.start`."""
        async with self._waits.on("the environment", because="it is being imported", limit_s=IMPORT_LIMIT_S + 5):
            await asyncio.gather(*(host.process.start() for host in self._hosts))

    async def open(self, row: dict[str, Any], seed: int) -> Opening:
        """See `Environments.open`."""
        host = min(self._hosts, key=lambda host: host.queued)
        answer = await host.ask(None, row, seed, ())
        return Opening(answer["prompt"], answer["tools"])

    async def hear(self, talk: int, row: dict[str, Any], seed: int, texts: Sequence[str]) -> list[Reply]:
        """See `Environments.hear`. The time limit counts from when the conversation's process takes it up."""
        host = self._host_of.get(talk)
        if host is None:
            host = self._host_of[talk] = min(self._hosts, key=lambda host: len(host.talks))
            host.talks.add(talk)
        answer = await host.ask(talk, row, seed, texts)
        return [Reply(*reply) for reply in answer["replies"]]

    def forget(self, talk: int) -> None:
        """See `Environments.forget`."""
        if (host := self._host_of.pop(talk, None)) is not None:
            host.talks.discard(talk)
            host.forgotten.append(talk)

    async def close(self) -> None:
        """See `Environments.close`."""
        async with self._waits.on("the environment", because="what is held is closed", limit_s=_CLOSE_LIMIT_S + 5):
            await asyncio.gather(*(host.process.kill(_CLOSE_LIMIT_S) for host in self._hosts))


class _Host:
    """One process, and what it holds."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        program = Program(
            "services.trainer.children.environment",
            spec.model_dump_json(),
            "environment.function",
            spec.function,
        )
        self.process = OwnProcess(program)
        self.talks: set[int] = set()
        """Conversations that are led here."""
        self.queued = 0
        """How many calls wait or run."""
        self.forgotten: list[int] = []
        """Conversations that are over, which the process is told with the next call."""
        self._limit_s = spec.timeout_s
        self._heard: dict[int, int] = {}
        """Conversation that the process holds -> how many texts it has heard."""
        self._turn = asyncio.Lock()

    async def ask(self, talk: int | None, row: dict[str, Any], seed: int, texts: Sequence[str]) -> dict[str, Any]:
        self.queued += 1
        try:
            async with self._turn:
                if talk is not None and talk not in self.talks:
                    raise Misbehaved("forgotten", "its conversation was over before it was asked")
                return await self._ask(talk, row, seed, texts)
        finally:
            self.queued -= 1

    async def _ask(self, talk: int | None, row: dict[str, Any], seed: int, texts: Sequence[str]) -> dict[str, Any]:
        try:
            if await self.process.start():
                self._heard.clear()
        except ConfigError as error:
            raise Misbehaved("crashed", str(error)) from error
        forgotten, self.forgotten = self.forgotten, []
        for gone in forgotten:
            self._heard.pop(gone, None)
        # What it has heard before counts again where an error follows: then it is made anew.
        heard = None if talk is None else self._heard.pop(talk, None)
        request: dict[str, Any] = {"talk": talk, "forget": forgotten, "texts": list(texts[heard or 0 :])}
        if heard is None:
            request |= {"row": row, "seed": seed}
        limit_s = self._limit_s * max(1, len(request["texts"]))
        try:
            packed = msgpack.packb(request)
        except (OverflowError, TypeError, ValueError) as error:
            raise Misbehaved("unsendable", f"a column cannot be given to the environment: {error}") from error
        try:
            answer = await self.process.call(packed, limit_s)
        except TimeoutError:
            raise Misbehaved("timeout", f"no answer within {limit_s:g} s; its process was killed") from None
        except Ended as error:
            raise Misbehaved("crashed", str(error)) from error
        if "raised" in answer:
            raise Misbehaved("raised", str(answer["raised"])[:_DETAIL_CHARS])
        if talk is not None:
            self._heard[talk] = len(texts)
        return answer
