"""Runs the user's reward functions in a pool of processes.

Each process scores one group at a time; a free process takes the next group.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Sequence
from typing import Any

from rlboost.services.trainer.adapters.user_code.log import UserCodeLog
from rlboost.services.trainer.adapters.user_code.process import UserCodeFault, UserCodeProcess, UserProgram, start_all
from rlboost.services.trainer.domain.origins import origin_of
from rlboost.services.trainer.domain.rewards.combination import combine
from rlboost.services.trainer.ports.rewards import RewardBatch, Scores
from rlboost.shared.job.reward import RewardPart, RewardSpec
from rlboost.shared.process.waiting import Waits

_DETAIL_CHARS = 500


class RewardPool:
    """`RewardFunction` over `reward.workers` processes."""

    def __init__(
        self, spec: RewardSpec, waits: Waits, log: UserCodeLog | None = None, *, token_origins: Collection[str] = ()
    ) -> None:
        """Describe the processes; `start` starts them.

        Args:
            spec: the reward.
            waits: where the start is listed.
            log: where the output of the processes goes.
            token_origins: services that may get `REWARD_TOKEN`, as `origin_of` names them.

        """
        self._spec = spec
        self._waits = waits
        self._log = log
        self._processes = [UserCodeProcess(_program(spec, token_origins), log) for _ in range(spec.workers)]
        self._idle: asyncio.LifoQueue[UserCodeProcess] = asyncio.LifoQueue()

    async def start(self) -> None:
        """See `RewardFunction.start`."""
        await start_all(self._processes, self._waits, "the reward function")
        for process in self._processes:
            self._idle.put_nowait(process)

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`. The time limit starts when a process takes the group."""
        request = {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_ids,
            "completions_raw": batch.completions_raw,
            "columns": batch.columns,
            "solutions": batch.solutions,
        }
        process = await self._idle.get()
        try:
            await process.restart_if_ended()
            answer = await process.call(request, self._spec.timeout_s)
        except UserCodeFault as fault:
            return Scores(None, fault.reason, fault.detail)
        finally:
            self._idle.put_nowait(process)
        return _scores(answer, len(batch.completions), self._spec.parts)

    async def close(self) -> None:
        """See `RewardFunction.close`."""
        await asyncio.gather(*(process.kill() for process in self._processes))
        if self._log is not None:
            self._log.close()


def _program(spec: RewardSpec, token_origins: Collection[str]) -> UserProgram:
    parts = json.dumps(
        [
            {
                **part.model_dump(),
                "timeout_s": spec.timeout_s,
                "gets_token": part.url is not None and origin_of(part.url) in token_origins,
            }
            for part in spec.parts
        ]
    )
    functions = ", ".join(part.source for part in spec.parts)
    return UserProgram("rlboost.services.trainer.children.reward", parts, "reward.function", functions)


def _scores(answer: dict[str, Any], n: int, parts: Sequence[RewardPart]) -> Scores:
    """Check the answer of the reward functions for a group of `n`, and combine their rewards."""
    for part, values in zip(parts, answer["rewards"], strict=True):
        prefix = f"{part.name}: " if part.name else ""
        if len(values) != n:
            return Scores(None, "wrong_length", f"{prefix}{len(values)} rewards for {n} completions")
        if not all(value is None or math.isfinite(value) for value in values):
            return Scores(None, "not_a_number", f"{prefix}rewards {values}"[:_DETAIL_CHARS])
    rewards = combine(answer["rewards"], [part.weight for part in parts])
    by_part = {part.name: tuple(values) for part, values in zip(parts, answer["rewards"], strict=True) if part.name}
    if None in rewards:
        return Scores(None, "missing", f"no reward for completion {rewards.index(None)} of the group", by_part)
    return Scores(tuple(reward for reward in rewards if reward is not None), parts=by_part)
