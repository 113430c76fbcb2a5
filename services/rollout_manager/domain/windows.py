"""The seeding window of a step, and how its length is learned (paper, section 4.1 and algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

# --- generation -------------------------------------------------------------------------------------------------------
#
# Predicts how long the generation of a step takes with other numbers of workers.
#
# A decode step takes a fixed time, in which the weights are read, and a time that grows with its batch. A sample of n
# tokens takes n decode steps wherever it runs: the fixed time of the longest sample's steps is a latency that no
# number of workers shortens. The rest is work, which the workers share. Workers count alike, whatever their kind.


MIN_EFFICIENCY = 0.25
"""A worker is worth having if it shortens a step by at least this part of what it would without latency."""
MAX_WORKERS = 4096
"""Beyond it, `workers_worth_having` does not search."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation of all samples of one step."""

    latency_s: float
    """Time that any number of workers needs."""
    work_s: float
    """Time that the workers share, in worker-seconds."""

    def duration_s(self, workers: float) -> float:
        """Return how long this number of workers takes; infinity for none."""
        return self.latency_s + self.work_s / workers if workers else math.inf

    def window_s(self, workers: float, reserved: float, train_s: float) -> float:
        """Return the seeding window after which the workers alone end the step's samples just when training ends.

        Without preemptible workers: until the reserved ones have generated everything.

        Args:
            workers: number of preemptible workers.
            reserved: number of reserved workers.
            train_s: training time of a step.

        """
        alone_s = self.duration_s(workers)
        if alone_s <= train_s:
            return 0.0
        return self.duration_s(workers + reserved) * (1.0 - train_s / alone_s)

    def step_s(self, workers: float, reserved: float, train_s: float) -> float:
        """Return how long window and training of a step take; infinity without any worker. Arguments: `window_s`."""
        return self.window_s(workers, reserved, train_s) + train_s

    def workers_worth_having(self, reserved: int, train_s: float) -> int:
        """Return N_prem of the paper: from this number of preemptible workers on, no window is needed.

        Fewer where the latency dominates: see `MIN_EFFICIENCY`.
        """
        for workers in range(MAX_WORKERS):
            present = workers + reserved
            before_s, after_s = (self.step_s(n, reserved, train_s) for n in (workers, workers + 1))
            if before_s == train_s or (present and (before_s / after_s - 1.0) * present < MIN_EFFICIENCY):
                return workers
        return MAX_WORKERS


# --- tuner ------------------------------------------------------------------------------------------------------------
#
# Tunes how long the reserved engines generate at the start of a step, and how many workers are worth having.
#
# The paper's algorithm 1: when the trainer waits for samples, the next window is longer; when the preemptible workers
# wait for the next weights, it is shorter; the result is remembered for each fleet size. Differences:
#
# - Of the workers' wait, only the part above its usual minimum counts. The minimum is unavoidable (the last
#   micro-batch, the optimizer, the publishing); weighing it against an idle trainer makes windows too short.
# - Seconds are not rounded.
# - A difference that is small relative to the step changes nothing: throughput is flat around the best window, and
#   following noise costs more than it gains.
# - For a new fleet size the last window is changed by what a model of the generation says: see `Generation`. The
#   first window of a job measures instead of guessing.
#
# With staleness the workers wait only at the staleness limit: there the same two waits keep the buffer of samples
# generated ahead between empty and full.


WAIT_DIFFERENCE_DIVISOR = 2.0
"""Divisor of the difference of the waits (eta in the paper, whose released code has 3)."""
MIN_WAIT_RISE_FRACTION = 0.2
"""How much of the difference one step adds to the workers' minimum wait, which falls at once."""
NEWEST_STEP_WEIGHT = 0.5
"""Weight of the newest step in the model of the generation: heartbeats sample how busy workers are."""
FLEET_CHANGE_DIVISOR = 1.5
"""A further divisor when workers joined or left: that influences the waits as well."""
NOISE_FRACTION = 0.05
"""Differences below this fraction of the step are noise."""
WindowSource = Literal["fixed", "off", "first", "memory", "predicted"]


@dataclass(slots=True)
class WindowTuner:
    """What was learned for one job; stored with the job. Times are seconds."""

    window_s: float | None = None
    """The window as last adapted; None before the first step was measured."""
    memory: dict[int, float] = field(default_factory=dict)
    """Number of preemptible workers -> window (M in the paper)."""
    min_wait_s: float = 0.0
    """How long the workers wait even when the trainer waits for them: no window changes that part."""
    train_s: float = 0.0
    """Training time of the last step."""
    latency_s: float = 0.0
    """See `Generation`, also for the work; means over the last steps."""
    work_s: float = 0.0
    target_workers: int | None = None
    """Number of preemptible workers worth having (N_prem in the paper): see `Generation.workers_worth_having`."""
    step_s: float = 0.0
    """Duration of the last step."""
    fleet_mean: float = 0.0
    """Number of preemptible workers during the last step, a mean over its time."""
    reserved: int = 0
    """Number of reserved workers at the end of the last step."""
    worker_tokens_per_s: float = 0.0
    """Throughput of the mean worker that `work_s` and `target_workers` count: by its share of the work; 0: unknown."""
    tokens_per_s: float = 0.0
    """Tokens delivered per second of the last step."""

    @property
    def generation(self) -> Generation:
        """Return the model of the generation of a step."""
        return Generation(self.latency_s, self.work_s)

    def choose(self, fleet: int, reserved: int) -> tuple[float | None, WindowSource]:
        """Return the window for a step that begins with these numbers of workers, and its source.

        None: nothing was measured yet, so the window lasts until half of the step's samples are finished.

        Args:
            fleet: preemptible workers.
            reserved: reserved workers.

        """
        if fleet in self.memory:
            return self.memory[fleet], "memory"
        if self.window_s is None:
            return None, "first"
        before_s = self.generation.window_s(self.fleet_mean, self.reserved, self.train_s)
        change_s = self.generation.window_s(fleet, reserved, self.train_s) - before_s if fleet and reserved else 0.0
        return max(0.0, self.window_s + change_s), "predicted"

    def learn(self, seen: StepTimes) -> dict[str, Any]:
        """Learn from a completed step; return the inputs and the results as fields of an event."""
        noise_s = NOISE_FRACTION * seen.step_s
        if seen.train_wait_s > noise_s:
            risen_s = self.min_wait_s + MIN_WAIT_RISE_FRACTION * (seen.remote_wait_s - self.min_wait_s)
            self.min_wait_s = min(seen.remote_wait_s, risen_s) if self.min_wait_s else seen.remote_wait_s
        difference = seen.train_wait_s - max(0.0, seen.remote_wait_s - self.min_wait_s)
        change_s = difference / WAIT_DIFFERENCE_DIVISOR if abs(difference) > noise_s else 0.0
        if not seen.steady:
            change_s /= FLEET_CHANGE_DIVISOR
        # One step can mislead: it halves or doubles the window at most, or adds a quarter of the step.
        change_s = min(max(change_s, -seen.window_s / 2), max(seen.window_s, 0.25 * seen.step_s))
        self.window_s = max(0.0, seen.window_s + change_s)
        if seen.steady:
            self.memory[seen.fleet] = self.window_s
        self.train_s, self.step_s = seen.train_s, seen.step_s
        self.fleet_mean, self.reserved = seen.fleet_mean, seen.reserved
        weight = 1.0 if self.target_workers is None else NEWEST_STEP_WEIGHT
        self.latency_s += weight * (seen.generation.latency_s - self.latency_s)
        tokens = self.work_s * self.worker_tokens_per_s
        self.work_s += weight * (seen.generation.work_s - self.work_s)
        if seen.worker_tokens_per_s and self.work_s:
            seen_tokens = seen.generation.work_s * seen.worker_tokens_per_s
            tokens += weight * (seen_tokens - tokens)
            is_first = not self.worker_tokens_per_s
            self.worker_tokens_per_s = seen.worker_tokens_per_s if is_first else tokens / self.work_s
        if seen.train_s > 0:
            self.target_workers = self.generation.workers_worth_having(seen.reserved, seen.train_s)
        self.tokens_per_s = seen.tokens / seen.step_s if seen.step_s > 0 else 0.0
        return {
            "train_wait_s": round(seen.train_wait_s, 3),
            "remote_wait_s": round(seen.remote_wait_s, 3),
            "min_wait_s": round(self.min_wait_s, 3),
            "step_s": round(seen.step_s, 3),
            "fleet_mean": round(seen.fleet_mean, 2),
            "latency_s": round(seen.generation.latency_s, 3),
            "work_s": round(seen.generation.work_s, 3),
            "window_was_s": round(seen.window_s, 3),
            "change_s": round(change_s, 3),
            "window_s": round(self.window_s, 3),
            "remembered_for": seen.fleet if seen.steady else None,
            "target_workers": self.target_workers,
        }


def target_workers(tuners: Iterable[WindowTuner]) -> int | None:
    """Return the number of preemptible workers worth having for all jobs; None while it is unknown for each."""
    known = [tuner.target_workers for tuner in tuners if tuner.target_workers is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measurements of one step. Times are seconds."""

    window_s: float
    """Length of the window."""
    train_wait_s: float
    """Time in which the trainer had the device and waited for samples."""
    remote_wait_s: float
    """Time in which the preemptible workers were idle."""
    train_s: float
    step_s: float
    fleet: int
    """Preemptible workers at the end."""
    fleet_mean: float
    steady: bool
    """True if the number of preemptible workers did not change."""
    reserved: int
    """Reserved workers at the end."""
    generation: Generation
    """The work of all workers of the job, and its latency."""
    tokens: int
    """Tokens delivered in the step."""
    worker_tokens_per_s: float = 0.0
    """See `WindowTuner`; 0 if the throughput of no worker was known."""


@dataclass(slots=True)
class StepMeter:
    """Measures a step while it runs; times on the manager's clock."""

    began_at: float
    updated_at: float
    idle_s: float = 0.0
    """Time in which preemptible workers were present and no samples in flight."""
    latency_s: float = 0.0
    """See `Generation`, also for the work."""
    work_s: float = 0.0
    rated_s: float = 0.0
    """Part of `work_s` of workers whose throughput is known."""
    rated_tokens: float = 0.0
    """What these generate in that time with full batches."""
    tokens_before: int = 0
    """Tokens delivered before the step."""
    workers_s: float = 0.0
    """Sum of the preemptible workers' times in the step."""
    min_fleet: int | None = None
    """Smallest number of preemptible workers in the step; None before the first update."""
    max_fleet: int = 0
    fleet: int = 0
    """Preemptible workers at the last update."""
    reserved: int = 0
    """Reserved workers at the last update."""
    generating: set[str] = field(default_factory=set)
    """Workers that had samples running at their last heartbeat."""

    def credit(self, worker: str, batch_share: float, elapsed_s: float, tokens_per_s: float = 0.0) -> None:
        """Count what a worker has done since its last heartbeat.

        Args:
            worker: the worker's id.
            batch_share: the part of its time that its batch took: see `Worker.batch_share`; 0 if it was idle.
            elapsed_s: seconds since that heartbeat.
            tokens_per_s: its throughput with a full batch; 0 if it is unknown.

        """
        if not batch_share:
            self.generating.discard(worker)
            return
        self.generating.add(worker)
        n_generating = min(len(self.generating), max(1, self.fleet + self.reserved))  # some of the set may be gone
        self.latency_s += (1.0 - batch_share) * elapsed_s / n_generating
        self.work_s += batch_share * elapsed_s
        if tokens_per_s:
            self.rated_s += batch_share * elapsed_s
            self.rated_tokens += batch_share * elapsed_s * tokens_per_s

    def update(self, now: float, *, fleet: int, reserved: int, working: bool) -> None:
        """Attribute the time since the last update to this state."""
        passed = now - self.updated_at
        self.updated_at, self.fleet, self.reserved = now, fleet, reserved
        self.workers_s += fleet * passed
        self.min_fleet = fleet if self.min_fleet is None else min(self.min_fleet, fleet)
        self.max_fleet = max(self.max_fleet, fleet)
        if fleet and not working:
            self.idle_s += passed

    @property
    def generation(self) -> Generation:
        """Return what was measured of the step's generation so far."""
        return Generation(self.latency_s, self.work_s)

    def without_spot_s(self, window_s: float, train_wait_s: float) -> float | None:
        """Return how long the step would have taken the reserved workers alone; None without any.

        In place of the window and of the trainer's wait for samples, they would have generated all of the step.
        """
        if not self.reserved:
            return None
        return self.updated_at - self.began_at - window_s - train_wait_s + self.generation.duration_s(self.reserved)

    def measure(self, window_s: float, train_wait_s: float, train_s: float, tokens: int) -> StepTimes:
        """Return the measurements of the step that ends now; `tokens`: delivered since the job began."""
        step_s = self.updated_at - self.began_at
        return StepTimes(
            window_s=window_s,
            train_wait_s=train_wait_s,
            remote_wait_s=self.idle_s,
            train_s=train_s,
            step_s=step_s,
            fleet=self.fleet,
            fleet_mean=self.workers_s / step_s if step_s > 0 else float(self.fleet),
            steady=self.min_fleet == self.max_fleet,
            reserved=self.reserved,
            generation=self.generation,
            tokens=tokens - self.tokens_before,
            worker_tokens_per_s=self.rated_tokens / self.rated_s if self.rated_s else 0.0,
        )


# --- window -----------------------------------------------------------------------------------------------------------
#
# The seeding window (paper, section 4.1): how long the reserved engines generate at the start of each step.
#
# A step's phases: `open` (all engines generate), `closing` (the reserved engines are commanded to suspend), `ended`
# (they are suspended; the device is the trainer's). Without preemptible workers the window closes when all samples
# are generated, which is a plain co-located trainer. When preemptible workers leave and the remaining ones are too
# slow, or none remains, the window stays open or reopens. `WindowTuner` decides the length.


Reason = Literal["window", "finished", "no_reserved"]


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The inputs of a decision."""

    now: float
    in_flight: int
    """Samples of the step in flight."""
    requested: int
    """Samples of the step in all."""
    reserved_awake: int
    """Reserved workers that are present and not suspended."""
    reserved: int
    preemptible_ready: int
    """Preemptible workers that can generate for the step now."""
    preemptible: int
    """Preemptible workers that are present, ready or about to be."""
    too_slow: bool = False
    """Preemptible workers left, and the remaining ones would keep the trainer waiting for long."""
    of_models: int = 0
    """Requests of the step to the job's other models in flight."""
    unpaid: int = 0
    """Those of `of_models` to models whose budget spot workers have used up."""

    @property
    def n_unfinished(self) -> int:
        """Return how many samples and requests the step waits for."""
        return self.in_flight + self.of_models

    @property
    def needs_reserved(self) -> bool:
        """Return True if spot workers alone cannot finish the step in time."""
        is_left_alone = self.preemptible == 0 or self.too_slow
        return bool(self.n_unfinished and is_left_alone) or bool(self.unpaid and not self.in_flight)


@dataclass(slots=True)
class Window:
    """The window of one step. Times are on the manager's clock."""

    step: int
    length_s: float | None
    """None: until half of the step's samples are finished."""
    phase: Literal["open", "closing", "ended"] = "open"
    began_at: float | None = None
    """When the step's first sample was placed."""
    reason: Reason = "window"
    lasted_s: float = 0.0
    """How long it lasted until it closed for the first time."""
    reopened: bool = False
    fleet: int = 0
    """Preemptible workers that `length_s` is for."""
    max_fleet: int = 0
    """The largest number of preemptible workers during the step."""
    too_slow: bool = False
    """See `StepSnapshot`; as of the last check."""
    checked_at: float = 0.0
    meter: StepMeter | None = None
    """Measures the step; None after a restart in its middle."""

    def on_placed(self, now: float) -> None:
        """Record that a sample was placed: the window begins with the first one."""
        if self.began_at is None:
            self.began_at = now

    def length_so_far(self, now: float) -> float:
        """Return the seconds since the window began."""
        return 0.0 if self.began_at is None else now - self.began_at

    def uses_reserved(self, preemptible: int) -> bool:
        """Return True if the reserved engines should generate now."""
        return self.phase == "open" and (self.reopened or self.length_s != 0 or preemptible == 0)

    def advance(self, snapshot: StepSnapshot) -> Literal["close", "end", "reopen"] | None:
        """Enter the next phase if it is due, and return the transition."""
        match self.phase:
            case "open":
                reason = self._close_reason(snapshot)
                if reason is not None:
                    self.phase, self.reason = "closing", reason
                    if not self.reopened:
                        self.lasted_s = self.length_so_far(snapshot.now)
                    return "close"
            case "closing":
                if snapshot.reserved_awake == 0:
                    self.phase = "ended"
                    return "end"
            case "ended":
                if snapshot.reserved and snapshot.needs_reserved:
                    self.phase, self.began_at, self.reopened = "open", snapshot.now, True
                    return "reopen"
        return None

    def _close_reason(self, snapshot: StepSnapshot) -> Reason | None:
        if snapshot.n_unfinished == 0:
            return "finished"
        if snapshot.reserved == 0 and snapshot.preemptible:
            return "no_reserved"
        return (
            "window" if snapshot.preemptible_ready and not snapshot.too_slow and self._time_is_over(snapshot) else None
        )

    def _time_is_over(self, snapshot: StepSnapshot) -> bool:
        if self.length_s is None:
            return snapshot.in_flight * 2 <= snapshot.requested
        return self.length_s == 0 or (self.began_at is not None and snapshot.now - self.began_at >= self.length_s)
