"""Chooses the prompts of each step: skips prompts by their earlier mean rewards.

The plan of a step is a pure function of the job and of the scores known when the step is first requested. With
staleness S, step n is requested before step n - S starts, so exactly the scores of steps before n - S count. Plans and
scores are recorded, and records take precedence: a restarted trainer gets the same plans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlboost.services.trainer.domain.advantages import reaches
from rlboost.services.trainer.domain.plan import epoch_order
from rlboost.shared.errors import Fatal
from rlboost.shared.job.spec import GeneratingJob
from rlboost.shared.job.training import CurriculumSpec

Means = Sequence[tuple[int, float]]
"""(row, mean reward) of each scored training group of a step."""
SkipFunction = Callable[[Sequence[float], int, int], bool]
"""The user's function: (mean rewards of a row's groups, oldest first; step; row) -> whether to skip the row."""


@dataclass(frozen=True, slots=True)
class PromptSelection:
    """The prompts of one step."""

    rows: tuple[int, ...]
    next: int
    """Position in the epoch order at which the next step continues."""
    skipped: Mapping[str, int]
    """Reason (`solved`, `failed`, `function`) -> number of prompts skipped for it."""
    recalled: int = 0
    """Number of `rows` that would be skipped, but fill up the step because too few others are left."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics for the run log."""
        return {"data/recalled": self.recalled, **{f"data/skipped_{why}": n for why, n in self.skipped.items()}}


class Curriculum:
    """Chooses the prompts of a job's steps, which are planned in order."""

    def __init__(
        self, spec: GeneratingJob, n_rows: int, skip_function: SkipFunction | None, records: Mapping[str, str]
    ) -> None:
        """Continue from `records`.

        Args:
            spec: a job with a curriculum.
            n_rows: number of training prompts.
            skip_function: `data.curriculum.function`, if there is one.
            records: step -> last result of `record`; empty for a new job.

        """
        assert spec.data.curriculum is not None
        self._spec: CurriculumSpec = spec.data.curriculum
        self._seed, self._per_step = spec.trainer.seed, spec.data.prompts_per_step
        self._lag = spec.elastic.max_staleness
        self._n_rows = n_rows
        self._skip_function = skip_function
        self._selections: dict[int, PromptSelection] = {}
        self._scored: dict[int, Means] = {}
        self._history: dict[int, list[tuple[int, float]]] = {}
        """Row number in the training data -> (step, mean reward) of its groups that count by now, oldest first."""
        self._counted_until = 0
        for step, record in records.items():
            self._restore(int(step), json.loads(record))

    def plan(self, step: int) -> PromptSelection:
        """Return the prompts of a step, recorded or new.

        Raises:
            Fatal: the record of the previous step is missing.

        """
        for scored in range(self._counted_until, step - self._lag):
            self._count_scores(scored)
        if step not in self._selections:
            if step and step - 1 not in self._selections:
                raise Fatal(f"the prompts of step {step} are not recorded: start a new job")
            start = self._selections[step - 1].next if step else 0
            self._selections[step] = self._walk(step, start)
        return self._selections[step]

    def skips(self, step: int, row: int) -> bool:
        """Return True if a row is skipped in a planned step; planning later steps does not change the result."""
        return bool(self._skip_reason(row, step))

    def score(self, step: int, means: Means) -> None:
        """Add the scores of a planned step; for a step that is trained again, keep the recorded scores."""
        self._scored.setdefault(step, tuple(means))

    def record(self, step: int) -> str:
        """Return the record of a planned step, as JSON."""
        chosen = self._selections[step]
        return json.dumps(
            {
                "rows": chosen.rows,
                "next": chosen.next,
                "skipped": dict(chosen.skipped),
                "recalled": chosen.recalled,
                "means": self._scored.get(step),
            }
        )

    def _restore(self, step: int, record: Mapping[str, Any]) -> None:
        self._selections[step] = PromptSelection(
            tuple(record["rows"]), record["next"], record["skipped"], record["recalled"]
        )
        if record["means"] is not None:
            self._scored[step] = tuple((row, mean) for row, mean in record["means"])

    def _count_scores(self, step: int) -> None:
        """Count a step's scores from now on."""
        self._counted_until = step + 1
        for row, mean in self._scored.get(step, ()):
            self._history.setdefault(row, []).append((step, mean))

    def _walk(self, step: int, start: int) -> PromptSelection:
        rows: list[int] = []
        passed: list[tuple[int, str]] = []
        position, end = start, start + self._n_rows + self._per_step
        while len(rows) < self._per_step and position < end:
            row = epoch_order(self._seed, position // self._n_rows, self._n_rows)[position % self._n_rows]
            if why := self._skip_reason(row, step):
                passed.append((row, why))
            else:
                rows.append(row)
            position += 1
        # A step always has all its prompts: if too few are left, the first skipped ones fill it up.
        n_recalled = self._per_step - len(rows)
        counts = Counter(why for _, why in passed[n_recalled:])
        skipped = {why: counts[why] for why in self._reasons()}
        return PromptSelection((*rows, *(row for row, _ in passed[:n_recalled])), position, skipped, n_recalled)

    def _reasons(self) -> list[str]:
        rules = {
            "solved": self._spec.skip_solved_above,
            "failed": self._spec.skip_failed_below,
            "function": self._spec.function,
        }
        return [why for why, rule in rules.items() if rule is not None]

    def _skip_reason(self, row: int, step: int) -> str:
        """Return why a row is skipped, an empty text if it is not."""
        spec, history = self._spec, [(at, mean) for at, mean in self._history.get(row, ()) if at < step - self._lag]
        means = [mean for _, mean in history]
        too_old = spec.retry_steps is not None and history and step - history[-1][0] >= spec.retry_steps
        if len(means) >= spec.window and not too_old:
            mean = fmean(means[-spec.window :])
            if spec.skip_solved_above is not None and reaches(mean, spec.skip_solved_above):
                return "solved"
            if spec.skip_failed_below is not None and reaches(spec.skip_failed_below, mean):
                return "failed"
        return "function" if self._skip_function is not None and self._skip_function(tuple(means), step, row) else ""
