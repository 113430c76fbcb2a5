"""The reward function of jobs without one."""

from __future__ import annotations

from rlboost.services.trainer.ports.rewards import RewardBatch, Scores


class NoReward:
    """`RewardFunction` that returns 0 for each completion."""

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`."""
        return Scores((0.0,) * len(batch.completions))

    async def close(self) -> None:
        """See `RewardFunction.close`."""
