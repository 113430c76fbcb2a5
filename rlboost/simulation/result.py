"""What a simulation returns: steps, instances, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from rlboost.shared.units import HOUR_S


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

    def fleet(self) -> list[tuple[float, int]]:
        """Return (moment, number of instances from then on), in order of time."""
        changes = sorted(
            [(instance.start_s, 1) for instance in self.instances]
            + [(i.end_s, -1) for i in self.instances if i.end_s < self.duration_s]
        )
        counts = [(0.0, 0)]
        for moment, change in changes:
            counts.append((moment, counts[-1][1] + change))
        return [a for a, b in pairwise([*counts, (float("inf"), 0)]) if a[0] != b[0]]
