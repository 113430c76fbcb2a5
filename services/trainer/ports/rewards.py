"""The user's reward functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """The arguments of a reward function for one group, in TRL's form: one entry per completion.

    As in TRL, completions are without special tokens.
    """

    prompts: list[str | list[dict[str, Any]]]
    completions: list[str | list[dict[str, Any]]]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    solutions: list[str] = field(default_factory=list)
    """The texts of what the model generated, as in verl: without special tokens and without observations."""
    completions_raw: list[str] = field(default_factory=list)
    """The texts of the completions with special tokens: one that ended by itself has its end token."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one call of the reward function."""

    rewards: tuple[float, ...] | None
    """One finite number per completion; None if the group could not be scored."""
    reason: str = ""
    """Why not: `timeout`, `raised`, `crashed`, `wrong_length`, `not_a_number`, `missing`, `unserializable`."""
    detail: str = ""
    parts: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Function name -> its unweighted reward per completion, if there are several; None where it does not apply."""


class RewardFunction(Protocol):
    """The user's reward functions. `score` always returns, whatever the user's code does."""

    async def start(self) -> None:
        """Import the functions.

        Raises:
            ConfigError: a function cannot be imported.

        """

    async def score(self, batch: RewardBatch) -> Scores:
        """Score the completions of one group."""

    async def close(self) -> None:
        """Stop the processes that run them."""
