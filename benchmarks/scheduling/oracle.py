"""The shortest time that any schedule could take for a step: a bound, not a schedule.

The oracle knows all lengths and what the fleet will do. A step of T seconds is possible only if all of this holds:

1. **One device.** The reserved engines generate only while the trainer does not train: for `T - publish - train`, less
   the time for handing the device over.
2. **Work is conserved.** Decoding costs each engine `a` for a step, `b` a token and `c` for each token of KV held. The
   sums over `b` and `c` do not depend on the schedule. The sum over `a` is smallest with the largest batches, and
   those are bounded by slots, by KV memory, and by 3. All of it must fit into the seconds that the engines are there.
3. **A long sample runs in small batches.** A sample of L tokens takes L decode steps, one after the other, within the
   time for generation; so its batches have on average at most the size at which a step takes `time / L`. The mean of
   1/n is at least 1 over the mean of n, so its share of `a` is at least `L a / n`.
4. **The trainer is fed.** To be done in T it may idle for `T - publish - train` at most: so at each moment groups of a
   certain amount of training must be complete. The cheapest such groups, and parts of groups, must fit into what the
   engines could do so far, with 2 and 3 for that moment. Whichever group ends last is trained after its last token.

Moves, commands and knowledge cost nothing here, engines are never empty for want of them, and batches can be formed at
will: the true optimum is slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.workload import Going, Group, Joining, SpotEvent, Workload

Array = npt.NDArray[np.float64]

_PRECISION_S = 1e-3
_MOMENTS = 16
"""At how many moments of a step the trainer is looked at."""


@dataclass(frozen=True, slots=True)
class Presence:
    """When a preemptible worker can generate within a step, in seconds from its begin."""

    speed: float
    begin_s: float
    end_s: float | None

    def engine_s(self, until_s: float) -> float:
        """Return the seconds that it gives up to `until_s`, at speed 1."""
        end_s = until_s if self.end_s is None else min(self.end_s, until_s)
        return self.speed * max(0.0, end_s - self.begin_s)


def bounds(work: Workload) -> list[float]:
    """Return the shortest time of each step, in seconds."""
    alive = {joining.worker: joining.speed for joining in work.fleet}
    found = []
    for groups, events in zip(work.steps, work.spot, strict=True):
        found.append(step_bound(work.case, groups, _presences(work.case, alive, events)))
        for event in events:
            if isinstance(event.what, Joining):
                alive[event.what.worker] = event.what.speed
            else:
                alive.pop(event.what.worker, None)
    return found


def _presences(case: Case, alive: dict[str, float], events: tuple[SpotEvent, ...]) -> list[Presence]:
    begins = {worker: (speed, case.pull_s) for worker, speed in alive.items()}
    ends: dict[str, float] = {}
    for event in events:
        match event.what:
            case Joining(worker, speed):
                begins[worker] = speed, event.after_s + case.pull_s
            case Going(worker):
                ends[worker] = event.after_s
    return [Presence(speed, begin, ends.get(worker)) for worker, (speed, begin) in begins.items()]


def step_bound(case: Case, groups: tuple[Group, ...], fleet: list[Presence]) -> float:
    """Return the shortest time of one step, in seconds."""
    step = _Step(case, groups, fleet)
    low, high = 0.0, 1.0
    while not step.possible(high):
        low, high = high, 2 * high
    while high - low > _PRECISION_S:
        middle = (low + high) / 2
        low, high = (low, middle) if step.possible(middle) else (middle, high)
    return low


class _Step:
    """The sums of one step, and whether it can be done in a given time."""

    def __init__(self, case: Case, groups: tuple[Group, ...], fleet: list[Presence]) -> None:
        self.case, self.fleet, spec = case, fleet, case.engine
        sizes = [len(group.lengths) for group in groups]
        self.lengths = np.array([length for group in groups for length in group.lengths], dtype=np.float64)
        prompts = np.repeat([float(group.prompt_tokens) for group in groups], sizes)
        self.first_of_group = np.cumsum([0, *sizes[:-1]])
        self.kv_mean = prompts + self.lengths / 2
        self.least_kv = float(prompts.min())
        kv_work = self._by_group(self.lengths * self.kv_mean)
        # What a group costs an engine whatever the batches: prefill, arithmetic, reading its KV.
        prefill_s = np.array([group.prompt_tokens for group in groups]) / spec.prefill_tokens_per_s
        self.fixed_s = prefill_s + spec.per_sample_s * self._by_group(self.lengths) + spec.per_kv_token_s * kv_work
        self.fewest_steps = kv_work / spec.kv_tokens if spec.kv_tokens else np.zeros(len(groups))
        self.train_s = np.array([group.tokens for group in groups]) / case.train_tokens_per_s
        self.best_speed = max([1.0 if case.reserved else 0.0, *(worker.speed for worker in fleet)])
        ready = [worker.begin_s for worker in fleet] + ([case.reserved_ready_s] if case.reserved else [])
        self.ready_s = min(ready, default=0.0)

    def _by_group(self, values: Array) -> Array:
        return np.add.reduceat(values, self.first_of_group)

    def possible(self, total_s: float) -> bool:
        """Return True if nothing speaks against so short a step."""
        trained_s = total_s - self.case.publish_s
        slack_s = trained_s - float(self.train_s.sum())
        if slack_s < 0:
            return False
        until_s = trained_s - float(self.train_s.min())
        moments = np.linspace(slack_s, until_s, _MOMENTS + 1)[1:]
        return all(self._on_time(float(at), float(at) - slack_s, slack_s) for at in moments) and self._on_time(
            until_s, float(self.train_s.sum()), slack_s
        )

    def _on_time(self, at_s: float, needed_s: float, slack_s: float) -> bool:
        """Return True if groups with so much training may be complete at a moment."""
        case, spec = self.case, self.case.engine
        done_s = at_s - case.reward_s
        time_s = (done_s - self.ready_s) * self.best_speed
        if time_s <= 0:
            return needed_s <= 0
        # The largest mean batch of each sample's decode steps (3): a + b n + c kv <= time / length.
        spare_s = time_s / self.lengths - spec.step_s - spec.per_kv_token_s * self.kv_mean
        batch = 1 + (spare_s - spec.per_sample_s) / (spec.per_sample_s + spec.per_kv_token_s * self.least_kv)
        steps = np.where(batch < 1.0, np.inf, self.lengths / np.clip(batch, 1.0, spec.slots))
        reserved_s = min(slack_s - case.switch_s, done_s) - case.reserved_ready_s
        engine_s = case.reserved * max(0.0, reserved_s) + sum(worker.engine_s(done_s) for worker in self.fleet)
        possible = np.isfinite(self._by_group(steps))
        return all(
            _cheapest(self.fixed_s[possible] + spec.step_s * some[possible], self.train_s[possible], needed_s)
            <= engine_s
            for some in (self._by_group(steps), self.fewest_steps)
        )


def _cheapest(costs: Array, values: Array, needed: float) -> float:
    """Return the least cost of items, or parts of items, with at least so much value; infinity if all have less."""
    order = np.argsort(costs / values)
    value = np.cumsum(values[order])
    whole = int(np.searchsorted(value, needed - 1e-9))
    if whole == len(value):
        return float(costs.sum()) if needed <= float(values.sum()) + 1e-6 else math.inf
    before = float(value[whole - 1]) if whole else 0.0
    part = max(0.0, (needed - before) / float(values[order][whole]))
    return float(costs[order][:whole].sum()) + part * float(costs[order][whole])


def best_tokens_per_s(case: Case) -> float:
    """Return the best speed of one engine with samples of typical size, in tokens/s."""
    kv = typical_kv(case)
    return case.engine.tokens_per_s(case.engine.fits(kv), kv)


def typical_kv(case: Case) -> float:
    """Return how many tokens of KV a running sample holds in the middle of its life."""
    middle = case.lengths.median or next(tokens for p, tokens in case.lengths.quantiles if p >= 0.5)
    return middle / 2 + sum(case.prompt_tokens) / 2
