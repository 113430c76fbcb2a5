"""From groups, in the order in which they came, to micro-batches and optimizer steps.

What is computed depends only on that order, never on when something came: a step that is trained again from recorded
samples gives the same bits. Forward and backward can begin before the last group is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_FLUSH_BATCHES = 6
"""How many micro-batches' worth of tokens to gather before sorting by length: more pads less, but begins later and
leaves more to do when the last group has come."""
_SHORTEST = 0.5
"""A row shorter than this part of a micro-batch's longest is not in it: so much of it is padding at most."""


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
    """Return micro-batches of rows of similar length, the longest first.

    Rows x longest row <= `max_tokens`, or it is one row; and less than half of that is padding.
    """
    batches: list[list[R]] = []
    for row in sorted(rows, key=lambda row: -row.n_tokens):
        if batches:
            longest, n = batches[-1][0].n_tokens, len(batches[-1])
            if (n + 1) * longest <= max_tokens and row.n_tokens >= _SHORTEST * longest:
                batches[-1].append(row)
                continue
        batches.append([row])
    return batches


def n_padded(batch: Sequence[Sized]) -> int:
    """Return how many tokens a micro-batch has with its padding."""
    return len(batch) * max(row.n_tokens for row in batch)
