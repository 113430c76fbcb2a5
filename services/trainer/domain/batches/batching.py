"""From groups, in order of completion, to micro-batches and optimizer steps.

The computation depends only on that order, never on timing: a step that is trained again from recorded samples
gives the same bits. Forward and backward start before the last group is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_FLUSH_BATCHES = 4
"""Number of micro-batches to gather before rows are packed. More fills micro-batches better, but means a later start
and more work after the last group."""


class Sized(Protocol):
    """A row of a batch."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and completion."""


R = TypeVar("R", bound=Sized)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Run forward and backward over these micro-batches."""

    rows: list[R]
    """Whole groups, in the order in which they were added."""
    indices: list[list[int]]
    """The rows of each micro-batch."""

    @property
    def batches(self) -> list[list[R]]:
        """The micro-batches."""
        return select(self.rows, self.indices)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Apply the accumulated gradients."""


class UpdatePlanner(Generic[R]):
    """Splits one step's groups into updates, in order of completion, and an update's rows into micro-batches."""

    def __init__(self, n_groups: int, n_updates: int, micro_batch_tokens: int) -> None:
        """Plan for `n_groups` groups, `n_updates` optimizer steps and `micro_batch_tokens` tokens at most.

        A longer row gets its own micro-batch.
        """
        self._ends = {(i + 1) * n_groups // n_updates for i in range(n_updates)}
        self._budget = micro_batch_tokens
        self._n_added = 0
        self._rows: list[R] = []

    def add(self, rows: Sequence[R]) -> list[Accumulate[R] | OptimizerStep]:
        """Add the rows of the next group (empty if it is not trained on) and return the work that is ready."""
        self._rows += rows
        self._n_added += 1
        update_ends = self._n_added in self._ends
        work: list[Accumulate[R] | OptimizerStep] = []
        if self._rows and (update_ends or sum(row.n_tokens for row in self._rows) >= _FLUSH_BATCHES * self._budget):
            work.append(Accumulate(self._rows, pack(self._rows, self._budget)))
            self._rows = []
        if update_ends:
            work.append(OptimizerStep())
        return work


def pack(rows: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    """Return the indices of micro-batches of at most `max_tokens` tokens, or of one longer row.

    Rows of similar length are together. All micro-batches but the last are more than half full.
    """
    sizes = [row.n_tokens for row in rows]
    batches: list[list[int]] = []
    tokens_left = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] > tokens_left or not batches:
            batches.append([])
            tokens_left = max_tokens
        batches[-1].append(index)
        tokens_left -= sizes[index]
    return batches


def select(rows: Sequence[T], batches: Sequence[Sequence[int]]) -> list[list[T]]:
    """Return the rows of micro-batches of indices."""
    return [[rows[index] for index in batch] for batch in batches]
