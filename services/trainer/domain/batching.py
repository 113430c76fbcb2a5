"""From groups, in the order in which they came, to micro-batches and optimizer steps.

What is computed depends only on that order, never on when something came: a step that is trained again from recorded
samples gives the same bits. Forward and backward can begin before the last group is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_FLUSH_BATCHES = 2
"""How many micro-batches' worth of tokens to gather before sorting by length: more pads less but begins later."""


class Sized(Protocol):
    """A row of a batch."""

    @property
    def n_tokens(self) -> int:
        """Prompt and completion together."""


R = TypeVar("R", bound=Sized)


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Run forward and backward over these micro-batches."""

    batches: list[list[R]]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Apply what was accumulated."""


class UpdatePlanner(Generic[R]):
    """Splits one step's groups into updates, in order of completion, and an update's rows into micro-batches."""

    def __init__(self, n_groups: int, n_updates: int, micro_batch_tokens: int) -> None:
        """Prepare for `n_groups` groups, `n_updates` optimizer steps and so many padded tokens a micro-batch at most.

        A row that is longer than that gets a micro-batch of its own.
        """
        self._ends = {(i + 1) * n_groups // n_updates for i in range(n_updates)}
        self._budget = micro_batch_tokens
        self._n_added = 0
        self._rows: list[R] = []

    def add(self, rows: Sequence[R]) -> list[Accumulate[R] | OptimizerStep]:
        """Take the rows of the next group (none, if it is not trained on) and return what can be done now."""
        self._rows += rows
        self._n_added += 1
        update_ends = self._n_added in self._ends
        work: list[Accumulate[R] | OptimizerStep] = []
        if self._rows and (update_ends or sum(row.n_tokens for row in self._rows) >= _FLUSH_BATCHES * self._budget):
            work.append(Accumulate(pack(self._rows, self._budget)))
            self._rows = []
        if update_ends:
            work.append(OptimizerStep())
        return work


def pack(rows: Sequence[R], max_tokens: int) -> list[list[R]]:
    """Return micro-batches of rows of similar length, the longest first; rows x longest row <= `max_tokens`."""
    longest_first = sorted(rows, key=lambda row: -row.n_tokens)
    batches: list[list[R]] = []
    while longest_first:
        n = max(1, max_tokens // max(1, longest_first[0].n_tokens))
        batches.append(longest_first[:n])
        longest_first = longest_first[n:]
    return batches
