"""Which prompts are skipped for what became of them before, and so which ones a step has.

The plan of a step is a pure function of the job and of the groups scored until it is asked for first: with staleness S
that is before step n - S begins, so the scores of steps before n - S count, and no others, however far scoring is. What
was planned and scored is recorded, and the record wins: a trainer that was killed plans the same again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.trainer.domain.plan import epoch_order
from shared.curriculum import CurriculumSpec
from shared.errors import Fatal
from shared.jobspec import GeneratingJob

Means = Sequence[tuple[int, float]]
"""(row, mean reward) of each training group of a step that was scored."""
Judge = Callable[[Sequence[float], int, int], bool]
"""(means of a row's groups so far, oldest first; the step; the row) -> whether to skip it: the user's function."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The prompts of one step."""

    rows: tuple[int, ...]
    next: int
    """Where the walk through the epochs goes on."""
    skipped: Mapping[str, int]
    """Why (`solved`, `failed`, `function`) -> how many prompts were passed over for it and not taken after all."""
    recalled: int = 0
    """How many of `rows` were to be skipped, and are there because others were not enough."""

    def metrics(self) -> dict[str, float]:
        """Return what the run log says of it."""
        return {"data/recalled": self.recalled, **{f"data/skipped_{why}": n for why, n in self.skipped.items()}}


class Curriculum:
    """A job's prompts, step after step; steps are planned in order."""

    def __init__(self, spec: GeneratingJob, n_rows: int, judge: Judge | None, records: Mapping[str, str]) -> None:
        """Go on where `records` end.

        Args:
            spec: a job with a curriculum.
            n_rows: number of training prompts.
            judge: what `data.curriculum.function` says.
            records: step -> what `record` returned for it last; empty for a new job.

        """
        assert spec.data.curriculum is not None
        self._spec: CurriculumSpec = spec.data.curriculum
        self._seed, self._per_step = spec.trainer.seed, spec.data.prompts_per_step
        self._lag = spec.elastic.max_staleness
        self._n_rows = n_rows
        self._judge = judge
        self._chosen: dict[int, Chosen] = {}
        self._scored: dict[int, Means] = {}
        self._history: dict[int, list[tuple[int, float]]] = {}
        """Row -> (step, mean) of its groups that count by now, oldest first."""
        self._told_until = 0
        for step, record in records.items():
            self._restore(int(step), json.loads(record))

    def plan(self, step: int) -> Chosen:
        """Return the prompts of a step, the recorded ones where there are.

        Raises:
            Fatal: the record of the step before it is gone.

        """
        for scored in range(self._told_until, step - self._lag):
            self._tell(scored)
        if step not in self._chosen:
            if step and step - 1 not in self._chosen:
                raise Fatal(f"the prompts of step {step - 1} are recorded nowhere: start a new job")
            start = self._chosen[step - 1].next if step else 0
            self._chosen[step] = self._walk(step, start)
        return self._chosen[step]

    def skips(self, step: int, row: int) -> bool:
        """Tell whether a row is to be skipped in a planned step: the same, however far later steps are planned."""
        return bool(self._why_not(row, step))

    def score(self, step: int, means: Means) -> None:
        """Take in how a planned step's groups were scored; what is recorded of a step that is trained again stays."""
        self._scored.setdefault(step, tuple(means))

    def record(self, step: int) -> str:
        """Return what is to be kept of a planned step, as JSON."""
        chosen = self._chosen[step]
        return json.dumps(
            {
                "rows": chosen.rows,
                "next": chosen.next,
                "skipped": dict(chosen.skipped),
                "recalled": chosen.recalled,
                "means": self._scored.get(step),
            }
        )

    def _restore(self, step: int, kept: Mapping[str, Any]) -> None:
        self._chosen[step] = Chosen(tuple(kept["rows"]), kept["next"], kept["skipped"], kept["recalled"])
        if kept["means"] is not None:
            self._scored[step] = tuple((row, mean) for row, mean in kept["means"])

    def _tell(self, step: int) -> None:
        """Let a step's scores count from now on."""
        self._told_until = step + 1
        for row, mean in self._scored.get(step, ()):
            self._history.setdefault(row, []).append((step, mean))

    def _walk(self, step: int, start: int) -> Chosen:
        rows: list[int] = []
        passed: list[tuple[int, str]] = []
        position, end = start, start + self._n_rows + self._per_step
        while len(rows) < self._per_step and position < end:
            row = epoch_order(self._seed, position // self._n_rows, self._n_rows)[position % self._n_rows]
            if why := self._why_not(row, step):
                passed.append((row, why))
            else:
                rows.append(row)
            position += 1
        # Everything was looked at: a step is never short of prompts, so the first that were passed over come after all.
        n_recalled = self._per_step - len(rows)
        counts = Counter(why for _, why in passed[n_recalled:])
        skipped = {why: counts[why] for why in self._reasons()}
        return Chosen((*rows, *(row for row, _ in passed[:n_recalled])), position, skipped, n_recalled)

    def _reasons(self) -> list[str]:
        rules = {
            "solved": self._spec.skip_solved_above,
            "failed": self._spec.skip_failed_below,
            "function": self._spec.function,
        }
        return [why for why, rule in rules.items() if rule is not None]

    def _why_not(self, row: int, step: int) -> str:
        """Say why a row is to be skipped, nothing if it is not."""
        spec, history = self._spec, [(at, mean) for at, mean in self._history.get(row, ()) if at < step - self._lag]
        means = [mean for _, mean in history]
        too_old = spec.retry_steps is not None and history and step - history[-1][0] >= spec.retry_steps
        if len(means) >= spec.window and not too_old:
            mean = sum(means[-spec.window :]) / spec.window
            if spec.skip_solved_above is not None and mean >= spec.skip_solved_above:
                return "solved"
            if spec.skip_failed_below is not None and mean <= spec.skip_failed_below:
                return "failed"
        return "function" if self._judge is not None and self._judge(tuple(means), step, row) else ""
