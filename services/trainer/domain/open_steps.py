"""The open steps: the one being trained, and those whose groups are requested ahead of it.

`rollouts.finished` has one order for all steps. That order alone determines which groups a step gets and in which
order, so a step that is trained again from the stream gets the same.
"""

from __future__ import annotations

from typing import Protocol

from rlboost.services.trainer.domain.groups.collector import GroupOutcome
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    GroupOpened,
    Message,
    SampleDropped,
    SampleFinished,
    SeedingEnded,
    SeedingReopened,
    TurnAnswered,
)
from rlboost.shared.streams.entries import Entry, position


class Collector(Protocol):
    """Collects the groups of one step: `StepCollector`, or `ConversationCollector` with an environment."""

    def apply(self, message: Message) -> GroupOutcome | None:
        """See `StepCollector.apply`."""


class OpenSteps:
    """Routes each entry to the collector of its step, and tracks the position that open steps must be read from."""

    def __init__(self, read_until: str) -> None:
        """Start without a step; an earlier process has counted late samples up to `read_until`."""
        self._read_until = position(read_until)
        self._open: dict[int, Collector] = {}
        self._first_position: dict[int, str] = {}
        """Step -> position before its first entry, in the order of these positions."""
        self._current = 0

    def open(self, step: int, collector: Collector) -> None:
        """Route entries of `step` to `collector` from now on."""
        self._open[step] = collector

    def enter(self, step: int) -> None:
        """Set the open step that is being trained, and close the steps before it."""
        self._current = step
        for done in [number for number in self._open if number < step]:
            del self._open[done]
            self._first_position.pop(done, None)

    def holds(self, message: Message) -> bool:
        """Return True if a message is of an open step or an earlier one; False if its step is not requested yet."""
        step = _step_of(message)
        return step is None or step <= max(self._open)

    def apply(self, before: str, entry: Entry) -> tuple[int, GroupOutcome] | None:
        """Apply the next entry; `before` is the position of the entry before it.

        Returns:
            The step and the outcome of the group that the entry completes or drops, if any.

        Raises:
            Unprocessable, Fatal: see `StepCollector.apply`; a sample of a step that is not open was not requested.

        """
        step = _step_of(entry.message)
        if step in self._open:
            self._first_position.setdefault(step, before)
        else:
            if step is not None and step < self._current and position(entry.id) <= self._read_until:
                return None
            step = self._current  # its collector counts late samples, and rejects unrequested ones
        outcome = self._open[step].apply(entry.message)
        return None if outcome is None else (step, outcome)

    def needed_from(self, cursor: str) -> str:
        """Return the position before the first entry that an open step needs, `cursor` if there is none yet."""
        return next(iter(self._first_position.values()), cursor)


def _step_of(message: Message) -> int | None:
    match message:
        case SampleFinished() | SampleDropped() | TurnAnswered():
            return SampleId.unpack(message.sample).step
        case GroupOpened():
            return SampleId.unpack(message.group).step
        case SeedingEnded() | SeedingReopened():
            return message.step
        case _:
            return None
