"""When to warn of faults in user code: the first dropped group of each reason, and each note that user code gives.

`rules.many_groups_dropped` warns of their number.
"""

from __future__ import annotations

_MAX_NOTES = 5
_NOT_USER_CODE = {"generation", "stale"}
"""Reasons of dropped groups that have other causes."""


class FaultWarnings:
    """The warnings of one job."""

    def __init__(self) -> None:
        """Start without any."""
        self._reasons: set[str] = set()
        self._notes: set[str] = set()

    def on_group_dropped(self, step: int, reason: str, detail: str) -> str:
        """Return a warning about a dropped group of a step, empty unless it is the first for this reason."""
        if reason in self._reasons or reason in _NOT_USER_CODE:
            return ""
        self._reasons.add(reason)
        return f"a group of step {step + 1} was dropped ({reason}) and is not trained: {detail}"

    def on_note(self, text: str) -> str:
        """Return a warning that user code gave, empty if its first line was reported before, or too many were."""
        head = text.partition("\n")[0]
        if not head or head in self._notes or len(self._notes) >= _MAX_NOTES:
            return ""
        self._notes.add(head)
        return text
