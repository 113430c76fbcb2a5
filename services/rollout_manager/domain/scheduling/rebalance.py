"""Selects samples to migrate while no sample is queued (paper, algorithm 2, continuous balancing).

The paper migrates a sample to an idle worker, and samples beyond the batching plateau. This version weighs each
migration: the time that the sample saves must exceed, with a margin, the cost of its prefill on the other worker. So
samples with few remaining tokens stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlboost.services.rollout_manager.domain.workers.throughput_model import Profile

HAND_OFF_S = 0.2
"""Time from the decision to migrate a sample to its first token on the other worker, without its prefill."""
PREFILL_SPEEDUP = 8.0
"""How many times faster prefill is than the decoding of a full batch; a cautious figure."""
MIN_GAIN_PER_COST = 2.0
"""A migration must save this many times its cost."""
DEAD_BAND = 1.2
"""A worker gives samples only if their tokens take this many times longer than they would on another worker."""
RECHECK_FRACTION = 0.9
"""A fleet is compared in full from this fraction of the dead band: intervals of earlier heartbeats may err so much."""
MIN_STAY_PER_COST = 20.0
"""A sample stays for this many times the cost of its migration: migrations slow workers down, which must not cause
further migrations."""
MAX_GIVERS = 8
"""Workers that give samples in one round: the next comparison is soon."""


@dataclass(frozen=True, slots=True)
class RunningSample:
    """One sample on a worker."""

    id: int
    remaining_tokens: float
    tokens: int
    """Its tokens in the KV cache, prompt included."""
    started: bool
    """True if it has tokens."""
    on_worker_s: float
    """Seconds since it was assigned to the worker."""


@dataclass(slots=True)
class WorkerLoad:
    """One worker."""

    worker: str
    batch_cap: int
    load: int
    tokens: int
    """Tokens of its samples in the KV cache."""
    profile: Profile
    speed: float
    running: Callable[[], Iterable[RunningSample]]
    """Called only where a sample may migrate."""

    def token_s(self, more: int = 0, tokens: int = 0) -> float:
        """Return the seconds between two tokens of a sample, with `more` samples of `tokens` in all."""
        return self.profile.token_interval_s(self.load + more, self.batch_cap, self.tokens + tokens) / self.speed

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a prefill of this many tokens, during which no other sample there gets a token."""
        return tokens / (PREFILL_SPEEDUP * self.profile.tokens_per_s(self.batch_cap, self.tokens) * self.speed)


def is_balanced(slowest_s: float, fastest_s: float) -> bool:
    """Return True if no migration can pay.

    Args:
        slowest_s: the longest interval between tokens that a worker has.
        fastest_s: the shortest interval that a worker would have with one more sample.

    """
    return slowest_s < RECHECK_FRACTION * DEAD_BAND * fastest_s


def select_migrations(loads: Sequence[WorkerLoad]) -> dict[str, list[int]]:
    """Return which samples each worker should release so that they end sooner on another worker; changes the loads.

    The slowest workers give to the worker where one more sample would be fastest: samples without tokens first, then
    those with the most remaining tokens, until no migration pays.
    """
    receivers = [(load.token_s(1), load.worker, load) for load in loads]
    heapq.heapify(receivers)
    released: dict[str, list[int]] = {}
    for giver in heapq.nsmallest(MAX_GIVERS, loads, key=lambda load: (-load.token_s(), load.worker)):
        queue: list[RunningSample] | None = None
        while giver.load:
            here_s, (there_s, _, receiver) = giver.token_s(), receivers[0]
            if receiver is giver or here_s < DEAD_BAND * there_s:
                break
            if queue is None:
                queue = sorted(giver.running(), key=lambda s: (s.started, -s.remaining_tokens, s.id), reverse=True)
            if not queue or not _pays(queue[-1], here_s, receiver):
                break
            sample = queue.pop()
            released.setdefault(giver.worker, []).append(sample.id)
            giver.load, giver.tokens = giver.load - 1, giver.tokens - sample.tokens
            receiver.load, receiver.tokens = receiver.load + 1, receiver.tokens + sample.tokens
            heapq.heapreplace(receivers, (receiver.token_s(1), receiver.worker, receiver))
    return released


def _pays(sample: RunningSample, here_s: float, receiver: WorkerLoad) -> bool:
    cost_s = HAND_OFF_S + receiver.prefill_s(sample.tokens if sample.started else 0)
    if sample.started and sample.on_worker_s < MIN_STAY_PER_COST * cost_s:
        return False
    return sample.remaining_tokens * (here_s - receiver.token_s(1, sample.tokens)) > MIN_GAIN_PER_COST * cost_s
