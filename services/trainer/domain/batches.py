"""From groups, in order of completion, to rows, micro-batches and optimizer steps, and to the ranks that train them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlboost.shared.wire import F32, I32, length
from rlboost.shared.wire import pack as pack_column

# --- Rows of a batch: a token sequence, and the columns that training it needs ----------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A prompt and its completion: what a forward pass needs."""

    prompt: bytes
    """int32 column of token ids."""
    completion: bytes
    """int32 column of token ids; `loss_mask` selects those with a loss."""
    sampled: bytes = b""
    """float32 column: log-probability of each loss token when it was generated. Forward passes do not read it."""
    loss_mask: bytes = b""
    """uint8 column aligned with `completion`: 1 for a token with a loss, 0 for a token of an environment; empty if all
    tokens have a loss. The float32 columns have one entry per loss token."""
    routed_experts: bytes = b""
    """Routed experts (`RoutedShape`) with an entry per loss token, which the router replays; empty: not known."""
    images: Sequence[str] = ()
    """Digests of the images of the prompt."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return length(self.prompt, I32) + length(self.completion, I32)

    @property
    def n_loss_tokens(self) -> int:
        """Number of tokens with a loss, at least one."""
        return sum(self.loss_mask) if self.loss_mask else length(self.completion, I32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow(SequenceRow):
    """A sequence to train on. Of each column after `advantages` all rows of a micro-batch have one, or none."""

    advantages: bytes
    """float32 column: advantage of each loss token; for a preference pair, the weight of its log-likelihood, and empty
    until that is known."""
    proximal: bytes = b""
    """float32 column: log-probability of each loss token under the weights at the start of the step; empty if these are
    the current weights, or not needed."""
    reference: bytes = b""
    """float32 column: log-probability of each loss token under the initial weights, if already computed."""
    values: bytes = b""
    """float32 column: the critic's value before each loss token, at the start of the step."""
    returns: bytes = b""
    """float32 column: the critic's target at each loss token."""

    @classmethod
    def of(cls, row: SequenceRow, advantages: bytes, **columns: Any) -> TrainingRow:
        """Return a row with these advantages, and with optional columns by name."""
        sequence = (row.prompt, row.completion, row.sampled, row.loss_mask, row.routed_experts, row.images)
        return cls(*sequence, advantages=advantages, **columns)


def constant(value: float, row: SequenceRow) -> bytes:
    """Return a float32 column with the same value at each loss token of a row."""
    return pack_column([value] * row.n_loss_tokens, F32)


# --- Distributes the rows of a micro-batch over data-parallel ranks ---------------------------------------------------


def partition(sizes: Sequence[int], n_parts: int) -> list[list[int]]:
    """Partition items so that the sums of the parts are close; deterministic.

    Longest item first, each to the part with the lowest sum so far (Graham's LPT rule, SIAM J. Appl. Math. 17, 1969:
    never above 4/3 of the best).

    Args:
        sizes: size of each item.
        n_parts: number of parts.

    Returns:
        The items' indices of each part, ascending; empty for some parts if there are fewer items than parts.

    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    sums = [0] * n_parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(n_parts), key=lambda part: (sums[part], len(parts[part]), part))
        parts[least].append(item)
        sums[least] += sizes[item]
    return [sorted(part) for part in parts]


# --- From groups, in order of completion, to micro-batches and optimizer steps ----------------------------------------
# The computation depends only on that order, never on timing: a step that is trained again from recorded samples gives
# the same bits. Forward and backward start before the last group is complete.


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
