"""The shortest time that any schedule could take for a step: a bound, not a schedule.

It knows all lengths and the future of the fleet. A step of T seconds is possible only if all of this holds:

1. **One device.** The reserved engines generate only while the trainer does not train: for `T - publish - train`, less
   the time to hand the device over.
2. **Work is conserved.** Decoding costs each engine `a` for a step, `b` for a token and `c` for each token of KV held.
   The sums over `b` and `c` do not depend on the schedule. The sum over `a` is smallest with the largest batches, which
   are bounded by slots, by KV memory, and by 3. All of it must fit into the seconds in which engines are present.
3. **A long sample runs in small batches.** A sample of L tokens takes L consecutive decode steps within the time for
   generation, so its batches have on average at most the size at which a step takes `time / L`. The mean of 1/n is at
   least 1 over the mean of n, so its share of `a` is at least `L a / n`.
4. **The trainer is fed.** To be done in T it may idle for `T - publish - train` at most, so at each moment groups with
   a certain training time must be complete. The cheapest such groups, and fractions of groups, must fit into what the
   engines could do until then, by 2 and 3. The group that ends last is trained after its last token.

Migrations, commands and knowledge cost nothing here, and batches can be formed at will: the true optimum is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlboost.simulation.result import SimulationResult
from rlboost.simulation.scenario import DELTA_SHARE, Group, Machine, SimulatedJob
from rlboost.simulation.traces import FleetTrace

Array = npt.NDArray[np.float64]

_PRECISION_S = 1e-3
_MOMENTS = 16
"""Moments of a step at which condition 4 is checked."""


@dataclass(frozen=True, slots=True)
class Presence:
    """When an instance can generate within a step, in seconds from its start."""

    start_s: float
    end_s: float

    def engine_s(self, until_s: float) -> float:
        """Return the engine seconds that it gives until a moment."""
        return max(0.0, min(self.end_s, until_s) - self.start_s)


def shortest_steps(job: SimulatedJob, machine: Machine, trace: FleetTrace, result: SimulationResult) -> list[float]:
    """Return the shortest time of each step of a result, given when it began and the fleet from then on, in seconds."""
    lives = _lives(trace, machine)
    found = []
    for step in result.steps:
        fleet = [
            Presence(max(0.0, start_s - step.start_s), end_s - step.start_s)
            for start_s, end_s in lives
            if end_s > step.start_s
        ]
        found.append(shortest_step(job, machine, job.groups(step.step, result.seed), fleet))
    return found


def _lives(trace: FleetTrace, machine: Machine) -> list[tuple[float, float]]:
    """Return from when and until when each instance can generate."""
    return [
        (start_s + (machine.startup_s if start_s > 0.0 else 0.0), end_s if end_s < trace.duration_s else math.inf)
        for start_s, end_s in trace.intervals()
    ]


def shortest_step(job: SimulatedJob, machine: Machine, groups: Sequence[Group], fleet: Sequence[Presence]) -> float:
    """Return the shortest time of one step, in seconds."""
    step = _Step(job, machine, groups, fleet)
    low, high = 0.0, 1.0
    while not step.possible(high):
        low, high = high, 2 * high
    while high - low > _PRECISION_S:
        middle = (low + high) / 2
        low, high = (low, middle) if step.possible(middle) else (middle, high)
    return low


class _Step:
    """The sums of one step, and whether it is possible in a given time."""

    def __init__(self, job: SimulatedJob, machine: Machine, groups: Sequence[Group], fleet: Sequence[Presence]) -> None:
        self.job, self.machine, self.fleet, spec = job, machine, fleet, machine.engine
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
        self.train_s = np.array([group.tokens for group in groups]) * job.train_s_per_token
        self.reserved_ready_s = max(machine.reserved_load_s, machine.switch_s)
        ready = [max(worker.start_s, machine.pull_s(DELTA_SHARE, 1, peers=True)) for worker in fleet]
        ready += [self.reserved_ready_s] if machine.reserved_engines else []
        self.ready_s = min(ready, default=0.0)

    def _by_group(self, values: Array) -> Array:
        return np.add.reduceat(values, self.first_of_group)

    def possible(self, total_s: float) -> bool:
        """Return True if no condition excludes so short a step."""
        trained_s = total_s - self.job.update_s - self.machine.publish_s(DELTA_SHARE)
        slack_s = trained_s - float(self.train_s.sum())
        if slack_s < 0:
            return False
        until_s = trained_s - float(self.train_s.min())
        moments = np.linspace(slack_s, until_s, _MOMENTS + 1)[1:]
        return all(self._on_time(float(at), float(at) - slack_s, slack_s) for at in moments) and self._on_time(
            until_s, float(self.train_s.sum()), slack_s
        )

    def _on_time(self, at_s: float, needed_s: float, slack_s: float) -> bool:
        """Return True if groups with this training time may be complete at a moment."""
        machine, spec = self.machine, self.machine.engine
        done_s = at_s - self.job.reward_s
        time_s = done_s - self.ready_s
        if time_s <= 0:
            return needed_s <= 0
        # The largest mean batch of each sample's decode steps (3): a + b n + c kv <= time / length.
        spare_s = time_s / self.lengths - spec.step_s - spec.per_kv_token_s * self.kv_mean
        batch = 1 + (spare_s - spec.per_sample_s) / (spec.per_sample_s + spec.per_kv_token_s * self.least_kv)
        steps = np.where(batch < 1.0, np.inf, self.lengths / np.clip(batch, 1.0, spec.slots))
        reserved_s = min(slack_s - machine.switch_s, done_s) - self.reserved_ready_s
        spot_s = sum(worker.engine_s(done_s) for worker in self.fleet)
        engine_s = machine.reserved_engines * max(0.0, reserved_s) + spot_s
        possible = np.isfinite(self._by_group(steps))
        return all(
            _cheapest(self.fixed_s[possible] + spec.step_s * some[possible], self.train_s[possible], needed_s)
            <= engine_s
            for some in (self._by_group(steps), self.fewest_steps)
        )


def _cheapest(costs: Array, values: Array, needed: float) -> float:
    """Return the least cost of (fractions of) items with at least this value; infinity if all together have less."""
    order = np.argsort(costs / values)
    value = np.cumsum(values[order])
    whole = int(np.searchsorted(value, needed - 1e-9))
    if whole == len(value):
        return float(costs.sum()) if needed <= float(values.sum()) + 1e-6 else math.inf
    before = float(value[whole - 1]) if whole else 0.0
    part = max(0.0, (needed - before) / float(values[order][whole]))
    return float(costs[order][:whole].sum()) + part * float(costs[order][whole])
