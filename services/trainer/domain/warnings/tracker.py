"""Tracks which warnings about a job's learning hold after each step, from the metrics of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost.services.trainer.domain.warnings.rules import RULES, Finding, History, JobFacts, Row

CLEAR_STEPS = 4
"""Steps in a row without a finding that end a warning. One more than the rules' window: a single good step among bad
ones does not end a warning only to raise it again."""


@dataclass(frozen=True, slots=True)
class Change:
    """A warning that begins, or ends."""

    finding: Finding
    """The finding with which the warning began."""
    since_step: int
    """The step after which it began."""
    holds: bool


@dataclass(slots=True)
class _Held:
    finding: Finding
    since_step: int
    n_without: int = 0
    """Steps since the rule last found something."""


class WarningTracker:
    """The warnings of one job. The state depends on the observed rows alone, so replaying recorded rows restores it."""

    def __init__(self, facts: JobFacts) -> None:
        """Start without a step."""
        self._facts = facts
        self._history = History()
        self._held: dict[str, _Held] = {}
        self._last_step = -1

    @property
    def warnings(self) -> list[str]:
        """Return the text of each warning that holds."""
        return [held.finding.text for held in self._held.values()]

    def observe(self, step: int, row: Row) -> list[Change]:
        """Take the metrics of a step; return what changes. A step that was observed before changes nothing."""
        if step <= self._last_step:
            return []
        self._last_step = step
        n_steps = self._history.n_steps
        self._history.add(row)
        found = {finding.name: finding for rule in RULES if (finding := rule(self._history, self._facts)) is not None}
        changes = []
        for name, finding in found.items():
            if name not in self._held:
                self._held[name] = _Held(finding, step)
                changes.append(Change(finding, step, holds=True))
            self._held[name].n_without = 0
        if self._history.n_steps == n_steps:
            return changes  # an evaluation after the last step ends no warning about training
        for name in [name for name in self._held if name not in found]:
            held = self._held[name]
            held.n_without += 1
            if held.n_without >= CLEAR_STEPS:
                del self._held[name]
                changes.append(Change(held.finding, held.since_step, holds=False))
        return changes
