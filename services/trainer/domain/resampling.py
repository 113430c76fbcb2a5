"""Replaces groups without a learning signal by groups of other prompts.

This is the dynamic sampling of DAPO, arXiv 2503.14476, section 3.2.

A step has `data.prompts_per_step` slots. A group whose rewards are all equal is replaced by a group of another prompt,
up to `algorithm.resample` times per slot. The replacement depends on the replaced group alone, and on the state of the
curriculum before the step was requested, but not on the order of scoring or on other slots. So each group is replaced
as soon as it is scored, and a restarted trainer requests the same replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlboost.services.trainer.domain.plan import epoch_order
from rlboost.shared.job.spec import GeneratingJob


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group, after shaping, are not all equal."""
    return min(rewards) != max(rewards)


@dataclass(frozen=True, slots=True)
class Replacements:
    """The rules of one step: which group replaces which, and with which prompt."""

    n: int
    """Number of slots of the step."""
    tries: int
    """Maximal number of replacements per slot."""
    seed: int
    step: int
    n_rows: int
    """Number of training prompts."""

    @classmethod
    def of(cls, spec: GeneratingJob, step: int, n_rows: int) -> Replacements:
        """Return the rules of a step of a job with `n_rows` training prompts."""
        tries = spec.algorithm.resample or 0
        return cls(spec.data.prompts_per_step, tries, spec.trainer.seed, step, n_rows)

    def replacement_number(self, number: int) -> int | None:
        """Return the number of the group that replaces group `number`, None if its slot has no tries left."""
        return number + self.n if number // self.n < self.tries else None

    def replacement_rows(
        self, initial: Sequence[int], is_skipped: Callable[[int], bool] = lambda _: False
    ) -> list[int]:
        """Return the prompts of replacement groups, each once, those that the curriculum skips last.

        They come from a separate shuffled order, so that resampling does not change the initial prompts of later steps.

        Args:
            initial: the initial prompts of the step. They are returned, rotated by one, if the data has no others.
            is_skipped: whether to prefer other prompts to this one.

        """
        most, seen = self.n * self.tries, set(initial)
        found: list[int] = []
        skipped: list[int] = []
        # Two epochs contain a whole one from any starting position.
        for position in range(self.step * most, self.step * most + 2 * self.n_rows):
            if len(found) == most:
                break
            epoch, offset = divmod(position, self.n_rows)
            row = epoch_order(self.seed, -1 - epoch, self.n_rows)[offset]
            if row not in seen:
                seen.add(row)
                (skipped if is_skipped(row) else found).append(row)
        return [*found, *skipped][:most] or list(dict.fromkeys([*initial[1:], *initial[:1]]))

    def row(self, number: int, rows: Sequence[int]) -> int:
        """Return the prompt of replacement group `number`: a different one for each, if `rows` has enough."""
        attempt, slot = divmod(number - self.n, self.n)
        # With too few rows, a slot still gets a different prompt in each attempt, as long as there is one.
        return rows[(slot + attempt * min(self.n, max(1, len(rows) // self.tries))) % len(rows)]
