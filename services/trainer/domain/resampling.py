"""Other prompts in place of groups that teach nothing: the dynamic sampling of DAPO, arXiv 2503.14476, section 3.2.

A step has as many places as `data.prompts_per_step`. A group whose rewards are all equal is replaced by a group of
another prompt, and that one by the next, up to `algorithm.resample` times a place. What replaces a group depends on
that group alone, and on what a curriculum knew before the step was asked for: neither on the order in which groups are
scored nor on the other places. So each is replaced as soon as it is scored, and whoever replaces it again, as a killed
trainer's successor may, asks for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.trainer.domain.plan import epoch_order
from shared.jobspec import GeneratingJob


def teaches(rewards: Sequence[float]) -> bool:
    """Tell whether some sample of a group is better than another, by rewards as they are trained on."""
    return min(rewards) != max(rewards)


@dataclass(frozen=True, slots=True)
class Replacements:
    """Which groups of one step may replace which, and with which prompts."""

    n: int
    """How many places the step has."""
    tries: int
    """How many replacements a place may have, one after the other."""
    seed: int
    step: int
    n_rows: int
    """Number of training prompts."""

    @classmethod
    def of(cls, spec: GeneratingJob, step: int, n_rows: int) -> Replacements:
        """Return those of a step of a job with so many training prompts."""
        tries = spec.algorithm.resample or 0
        return cls(spec.data.prompts_per_step, tries, spec.trainer.seed, step, n_rows)

    def number_after(self, number: int) -> int | None:
        """Return the number of the group that replaces group `number` in its place; None: there were enough."""
        return number + self.n if number // self.n < self.tries else None

    def spare(self, first: Sequence[int], is_skipped: Callable[[int], bool] = lambda _: False) -> list[int]:
        """Return the prompts that are in the step only in place of others, each once, and those to be skipped last.

        They are taken from an order of their own, in which step follows step: what the steps begin with stays the walk
        through the epochs that it is without them.

        Args:
            first: the prompts that the step begins with. Where the data have no others, these are given back.
            is_skipped: tells of a prompt whether others are to be taken as long as there are any.

        """
        most, seen = self.n * self.tries, set(first)
        found: list[int] = []
        skipped: list[int] = []
        # Two epochs hold a whole one from wherever the step begins.
        for position in range(self.step * most, self.step * most + 2 * self.n_rows):
            if len(found) == most:
                break
            epoch, place = divmod(position, self.n_rows)
            row = epoch_order(self.seed, -1 - epoch, self.n_rows)[place]
            if row not in seen:
                seen.add(row)
                (skipped if is_skipped(row) else found).append(row)
        return [*found, *skipped][:most] or list(dict.fromkeys([*first[1:], *first[:1]]))

    def row(self, number: int, spare: Sequence[int]) -> int:
        """Return the prompt of the replacement `number`: another one for each, where there are enough."""
        again, place = divmod(number - self.n, self.n)
        # Where there are too few for all, a place still has another prompt each time, for as long as there is one.
        return spare[(place + again * min(self.n, max(1, len(spare) // self.tries))) % len(spare)]
