"""When to warn of groups that user code failed to score: the first fault of each kind, then now and then a count."""

from __future__ import annotations

from collections.abc import Mapping

_STEPS_BETWEEN = 20
_MAX_NOTES = 5
_NOT_USER_CODE = {"generation", "stale"}
"""Reasons of dropped groups that have other causes."""


class FaultWarnings:
    """The warnings of one job."""

    def __init__(self) -> None:
        """Start without any."""
        self._reasons: set[str] = set()
        self._notes: set[str] = set()
        self._counted_at: int | None = None
        """The step of the last count."""

    def of_group(self, step: int, reason: str, detail: str) -> str:
        """Return a warning about a dropped group of a step, empty unless it is the first for this reason."""
        if reason in self._reasons or reason in _NOT_USER_CODE:
            return ""
        self._reasons.add(reason)
        return f"a group of step {step} was dropped ({reason}) and is not trained: {detail}"

    def of_step(self, step: int, dropped: Mapping[str, int], n_groups: int) -> str:
        """Return a warning about the dropped groups of a finished step, empty if there is nothing to report.

        Args:
            step: the step.
            dropped: reason -> number of groups.
            n_groups: all groups of the step.

        """
        counts = {reason: n for reason, n in dropped.items() if n and reason not in _NOT_USER_CODE}
        if not counts or (self._counted_at is not None and step - self._counted_at < _STEPS_BETWEEN):
            return ""
        self._counted_at = step
        shown = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))
        return f"{sum(counts.values())} of {n_groups} groups of step {step} were dropped: {shown}"

    def of_note(self, text: str) -> str:
        """Return a warning that user code gave, empty if its first line was reported before, or too many were."""
        head = text.partition("\n")[0]
        if not head or head in self._notes or len(self._notes) >= _MAX_NOTES:
            return ""
        self._notes.add(head)
        return text
