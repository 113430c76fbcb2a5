"""A fake `RewardFunction` without processes."""

from __future__ import annotations

from collections.abc import Callable

from rlboost.services.trainer.ports.rewards import RewardBatch, Scores


class FakeRewards:
    """A reward function in this process."""

    def __init__(self, function: Callable[[RewardBatch], Scores]) -> None:
        """Answer each group with `function`."""
        self._function = function
        self.closed = False

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`."""
        return self._function(batch)

    async def close(self) -> None:
        """See `RewardFunction.close`."""
        self.closed = True
