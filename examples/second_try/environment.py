"""Countdown with a second try: after a wrong answer the problem is asked once more. Standard library only."""

from __future__ import annotations

from typing import Any

from rlboost.environments import Step
from rlboost.examples.countdown.task import EOS, MISS, Problem, answer_of


class SecondTry:
    """Gives 1 for a problem that is solved at once and 1/2 for one that is solved the second time."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin with the row's prompt; nothing here is drawn, so that the seed does not matter."""
        del seed
        first, second, third = row["numbers"]
        self._problem = Problem((first, second, third), row["target"])
        self._n_tries = 0

    def step(self, text: str) -> Step:
        """Judge an answer; after a wrong one the problem follows again."""
        self._n_tries += 1
        answer = answer_of(text + EOS)
        if answer is not None and answer.solves(self._problem):
            return Step(reward=1.0 / self._n_tries, done=True)
        return Step(MISS + self._problem.prompt)
