"""What a simulation returns: steps, instances, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rlboost.shared.job.fleet import HOUR_S


@dataclass(frozen=True, slots=True)
class StepResult:
    """One complete step. Moments in seconds from the start of the trace, the rest in seconds."""

    step: int
    start_s: float
    end_s: float
    """Its weights are committed."""
    seeding_s: float
    """Time from the start of the step until the trainer had the device for the first time."""
    last_sample_s: float
    """Time from the start of the step until the last sample was delivered."""
    train_wait_s: float
    """How long the trainer had the device and waited for samples."""
    generated_tokens: int
    trained_tokens: int
    """Prompts and completions."""
    training: tuple[tuple[float, float], ...] = ()
    """(start, end) of each interval of training."""

    @property
    def duration_s(self) -> float:
        """Return the duration of the step."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """One spot instance, from its request to its end."""

    instance: str
    start_s: float
    end_s: float
    """When it ended, or the measured time did."""
    price_per_hour: float

    @property
    def billed_s(self) -> float:
        """Return the billed seconds."""
        return self.end_s - self.start_s

    @property
    def dollars(self) -> float:
        """Return the price of the billed time."""
        return self.billed_s * self.price_per_hour / HOUR_S


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts over the whole run, the steps before the measured ones included."""

    generated_tokens: int = 0
    """Tokens of the samples of all complete steps."""
    decoded_tokens: float = 0.0
    """Tokens decoded until the end of the last complete step: what exceeds `generated_tokens` was regenerated, or, with
    staleness, belongs to later steps."""
    migrations: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One run of one policy. Only complete steps count, and time until the end of the last one."""

    policy: str
    seed: int
    steps: tuple[StepResult, ...]
    instances: tuple[InstanceResult, ...]
    reserved_price_per_hour: float
    counters: Counters = Counters()

    @property
    def duration_s(self) -> float:
        """Return the measured time."""
        return self.steps[-1].end_s if self.steps else 0.0

    @property
    def tokens(self) -> int:
        """Return generated and trained tokens, both counted, as in the paper."""
        return sum(step.generated_tokens + step.trained_tokens for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput in generated and trained tokens."""
        return self.tokens / self.duration_s if self.duration_s else 0.0

    @property
    def reserved_dollars(self) -> float:
        """Return the price of the reserved cluster."""
        return self.duration_s * self.reserved_price_per_hour / HOUR_S

    @property
    def instance_dollars(self) -> float:
        """Return the price of all instances."""
        return sum(instance.dollars for instance in self.instances)

    @property
    def dollars(self) -> float:
        """Return the price of everything."""
        return self.reserved_dollars + self.instance_dollars

    @property
    def dollars_per_million_tokens(self) -> float:
        """Return the price of a million generated and trained tokens."""
        return 1e6 * self.dollars / self.tokens if self.tokens else 0.0

    @property
    def mean_instances(self) -> float:
        """Return the mean number of billed spot instances."""
        return sum(instance.billed_s for instance in self.instances) / self.duration_s if self.duration_s else 0.0


# --- Means over seeds, and ratios between policies --------------------------------------------------------------------


SAME = 0.03
"""Results whose relative difference is smaller count as equal: resolution and seeds change results by as much."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy: means over its runs."""

    policy: str
    runs: int
    steps: int
    """Measured steps of all runs together."""
    tokens_per_s: float
    min_tokens_per_s: float
    max_tokens_per_s: float
    dollars_per_million_tokens: float
    step_s: float
    seeding_s: float
    train_wait_s: float
    instances: float
    migrations_per_step: float
    regenerated_share: float
    """Tokens decoded in excess of the samples' tokens, relative to these."""

    def public(self) -> dict[str, Any]:
        """Return the figures, rounded."""
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


def summarize(results: Sequence[SimulationResult]) -> Summary:
    """Return the means of one policy's runs.

    Raises:
        ValueError: a run has no complete step.

    """
    if any(not result.steps for result in results):
        raise ValueError(f"a run of {results[0].policy} has no complete step")
    steps = [step for result in results for step in result.steps]
    rates = [result.tokens_per_s for result in results]
    all_steps = sum(result.steps[-1].step + 1 for result in results)
    generated = sum(result.counters.generated_tokens for result in results)
    decoded = sum(result.counters.decoded_tokens for result in results)
    return Summary(
        policy=results[0].policy,
        runs=len(results),
        steps=len(steps),
        tokens_per_s=fmean(rates),
        min_tokens_per_s=min(rates),
        max_tokens_per_s=max(rates),
        dollars_per_million_tokens=fmean(result.dollars_per_million_tokens for result in results),
        step_s=fmean(step.duration_s for step in steps),
        seeding_s=fmean(step.seeding_s for step in steps),
        train_wait_s=fmean(step.train_wait_s for step in steps),
        instances=fmean(result.mean_instances for result in results),
        migrations_per_step=sum(result.counters.migrations for result in results) / all_steps,
        regenerated_share=decoded / generated - 1.0,
    )


def ratio_text(value: float) -> str:
    """Return a ratio for people; differences below `SAME` are shown as none."""
    return "same" if abs(value - 1.0) < SAME else f"{value:.2f}x"
