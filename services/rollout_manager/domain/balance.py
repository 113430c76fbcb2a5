"""Which samples should go on elsewhere while nothing waits (paper, algorithm 2, continuous balancing).

The paper moves a sample to an idle worker, and samples beyond the batching plateau. Ours weighs each move: what a
sample wins by ending sooner must exceed, with a margin, what reading it in again costs. So short rests stay where they
are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.rollout_manager.domain.profile import Profile

HAND_OFF_S = 0.2
"""From the wish to move a sample to its first token elsewhere, reading in apart."""
PREFILL_FACTOR = 8.0
"""How many times faster tokens are read in than a full batch generates them, by caution."""
MARGIN = 2.0
"""A move must win so many times its cost."""
DEAD_BAND = 1.2
"""A worker gives only where its samples wait so many times longer for a token than they would elsewhere."""
STAY = 20.0
"""A sample stays for so many times the cost of its move: moves slow workers down, which must not cause more moves."""
GIVERS = 8
"""How many workers give in one go: the next comparison is soon."""


@dataclass(frozen=True, slots=True)
class Running:
    """One sample on a worker."""

    id: int
    rest: float
    """Tokens that it is expected to make yet."""
    tokens: int
    """Tokens that it keeps in the KV cache, prompt included."""
    begun: bool
    """Whether it has tokens, there or from elsewhere."""
    there_s: float
    """How long it has been there."""


@dataclass(slots=True)
class Load:
    """One worker."""

    worker: str
    batch: int
    load: int
    tokens: int
    """Tokens that its samples keep in the KV cache."""
    profile: Profile
    speed: float
    running: Callable[[], Iterable[Running]]
    """Asked for only where something may move."""

    def token_s(self, more: int = 0, tokens: int = 0) -> float:
        """Return the time between two tokens of a sample, with `more` samples of `tokens` in all.

        Samples beyond the batch take turns.
        """
        load = self.load + more
        step_s = self.profile.step_s(min(load, self.batch), self.tokens + tokens)
        return step_s * max(1.0, load / self.batch) / self.speed

    def prefill_s(self, tokens: int) -> float:
        """Return the time to read so many tokens in, during which nobody else there gets a token."""
        return tokens / (PREFILL_FACTOR * self.profile.tokens_per_s(self.batch, self.tokens) * self.speed)


def moves(loads: Sequence[Load]) -> dict[str, list[int]]:
    """Return which samples which workers should hand back, so that each ends sooner elsewhere; changes the loads.

    The slowest workers give to where one more sample would be fastest: samples that have not begun first, then those
    with the longest rest, until no move pays.
    """
    takers = [(load.token_s(1), load.worker, load) for load in loads]
    heapq.heapify(takers)
    asked: dict[str, list[int]] = {}
    for giver in heapq.nsmallest(GIVERS, loads, key=lambda load: (-load.token_s(), load.worker)):
        queue: list[Running] | None = None
        while giver.load:
            here_s, (there_s, _, taker) = giver.token_s(), takers[0]
            if taker is giver or here_s < DEAD_BAND * there_s:
                break
            if queue is None:
                queue = sorted(giver.running(), key=lambda s: (s.begun, -s.rest, s.id), reverse=True)
            if not queue or not _pays(queue[-1], here_s, taker):
                break
            sample = queue.pop()
            asked.setdefault(giver.worker, []).append(sample.id)
            giver.load, giver.tokens = giver.load - 1, giver.tokens - sample.tokens
            taker.load, taker.tokens = taker.load + 1, taker.tokens + sample.tokens
            heapq.heapreplace(takers, (taker.token_s(1), taker.worker, taker))
    return asked


def _pays(sample: Running, here_s: float, taker: Load) -> bool:
    cost_s = HAND_OFF_S + taker.prefill_s(sample.tokens if sample.begun else 0)
    if sample.begun and sample.there_s < STAY * cost_s:
        return False
    return sample.rest * (here_s - taker.token_s(1, sample.tokens)) > MARGIN * cost_s
