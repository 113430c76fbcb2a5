"""A reward function for jobs that have none."""

from __future__ import annotations

from services.trainer.ports import RewardBatch, Scores


class NoReward:
    """`RewardFunction` that adds nothing."""

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`."""
        return Scores((0.0,) * len(batch.completions))

    async def close(self) -> None:
        """See `RewardFunction.close`."""
