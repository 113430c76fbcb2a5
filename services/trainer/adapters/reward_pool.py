"""The user's reward functions in processes of our own: they may hang, raise, print, or kill their process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import msgpack

from services.trainer.adapters.own_process import IMPORT_LIMIT_S, Ended, OwnProcess, Program
from services.trainer.domain.rewards import combine
from services.trainer.ports import RewardBatch, Scores
from shared.errors import ConfigError
from shared.reward import RewardPart, RewardSpec
from shared.waiting import Waits

_DETAIL_CHARS = 500


class RewardPool:
    """`RewardFunction` over `reward.workers` processes; one group at a time in each."""

    def __init__(self, spec: RewardSpec, waits: Waits) -> None:
        """Prepare; `start` starts the processes."""
        self._spec = spec
        self._waits = waits
        self._workers = [OwnProcess(_program(spec)) for _ in range(spec.workers)]
        self._idle: asyncio.LifoQueue[OwnProcess] = asyncio.LifoQueue()

    async def start(self) -> None:
        """See `RewardFunction.start`."""
        async with self._waits.on("the reward function", because="it is being imported", limit_s=IMPORT_LIMIT_S + 5):
            await asyncio.gather(*(worker.start() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`. The time limit counts from when a process takes the group."""
        try:
            request = msgpack.packb(
                {
                    "prompts": batch.prompts,
                    "completions": batch.completions,
                    "completion_ids": batch.completion_ids,
                    "columns": batch.columns,
                    "solutions": batch.solutions,
                }
            )
        except (OverflowError, TypeError, ValueError) as error:
            return Scores(None, "unsendable", f"a column cannot be given to the reward function: {error}")
        worker = await self._idle.get()
        try:
            return await self._call(worker, request, len(batch.completions))
        finally:
            self._idle.put_nowait(worker)

    async def _call(self, worker: OwnProcess, request: bytes, n: int) -> Scores:
        try:
            await worker.start()
            answer = await worker.call(request, self._spec.timeout_s)
        except TimeoutError:
            return Scores(None, "timeout", f"no answer within {self._spec.timeout_s:g} s; its process was killed")
        except (ConfigError, Ended) as error:
            return Scores(None, "crashed", str(error))
        return _judge(answer, n, self._spec.parts)

    async def close(self) -> None:
        """See `RewardFunction.close`."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))


def _program(spec: RewardSpec) -> Program:
    parts = json.dumps([{**part.model_dump(), "timeout_s": spec.timeout_s} for part in spec.parts])
    names = ", ".join(part.source for part in spec.parts)
    return Program("services.trainer.children.reward", parts, "reward.function", names)


def _judge(answer: dict[str, Any], n: int, parts: Sequence[RewardPart]) -> Scores:
    if "raised" in answer:
        return Scores(None, "raised", str(answer["raised"])[:_DETAIL_CHARS])
    for part, values in zip(parts, answer["rewards"], strict=True):
        who = f"{part.name}: " if part.name else ""
        if len(values) != n:
            return Scores(None, "wrong_length", f"{who}{len(values)} rewards for {n} completions")
        if not all(value is None or math.isfinite(value) for value in values):
            return Scores(None, "not_a_number", f"{who}rewards {values}"[:_DETAIL_CHARS])
    rewards = combine(answer["rewards"], [part.weight for part in parts])
    given = {part.name: tuple(values) for part, values in zip(parts, answer["rewards"], strict=True) if part.name}
    if None in rewards:
        return Scores(None, "missing", f"no reward for completion {rewards.index(None)} of the group", given)
    return Scores(tuple(reward for reward in rewards if reward is not None), parts=given)
