"""Several steps at once: the one being trained, and those whose groups were asked for ahead of it.

`rollouts.finished` has one order for all of them. What a step gets, and in which order, follows from that order alone,
whenever it is read: a step that is trained again from the recorded samples gets the same.
"""

from __future__ import annotations

from services.trainer.domain.collector import Outcome, StepCollector
from shared.bus import Entry, position
from shared.ids import SampleId
from shared.messages import (
    GroupOpened,
    Message,
    SampleDropped,
    SampleFinished,
    SeedingEnded,
    SeedingReopened,
    TurnAnswered,
)


class StepWindow:
    """Gives each entry to its step, and knows from where the open steps would have to be read again."""

    def __init__(self, read_until: str) -> None:
        """Start without a step; up to `read_until` a predecessor has counted what was late."""
        self._read_until = position(read_until)
        self._open: dict[int, StepCollector] = {}
        self._begins: dict[int, str] = {}
        """Step -> position before its first entry, in the order of these positions."""
        self._current = 0

    def open(self, step: int, collector: StepCollector) -> None:
        """Keep from now on what comes for `step`."""
        self._open[step] = collector

    def enter(self, step: int) -> None:
        """Note that `step`, which is open, is being trained: nothing is needed any more of those before it."""
        self._current = step
        for done in [number for number in self._open if number < step]:
            del self._open[done]
            self._begins.pop(done, None)

    def holds(self, message: Message) -> bool:
        """Tell whether a message is of an open step or an earlier one; what is of a later one has to wait."""
        step = _step_of(message)
        return step is None or step <= max(self._open)

    def fold(self, before: str, entry: Entry) -> tuple[int, Outcome] | None:
        """Take in the next entry; `before` is the position of the one before it.

        Returns:
            The step and the group that are decided with it, if one is.

        Raises:
            Fatal: see `StepCollector.fold`; a sample of a step that is not open is one that nobody asked for.

        """
        step = _step_of(entry.message)
        if step in self._open:
            self._begins.setdefault(step, before)
        else:
            if step is not None and step < self._current and position(entry.id) <= self._read_until:
                return None
            step = self._current  # which counts what is late, and refuses what nobody asked for
        outcome = self._open[step].fold(entry.message)
        return None if outcome is None else (step, outcome)

    def needed_from(self, cursor: str) -> str:
        """Return the position behind which everything lies that the open steps need, `cursor` if nothing came yet."""
        return next(iter(self._begins.values()), cursor)


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
