"""The simulated job: what a step generates and trains, with lengths that depend on the seed and the step alone."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlboost.shared.ids import SampleId

JOB_ID = "job"
JOB_NO = 1

Quantiles = tuple[tuple[float, float], ...]
"""(probability, tokens), both rising; lengths between two points are interpolated geometrically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of completion lengths in tokens: lognormal, or by quantiles."""

    cap: int
    median: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm."""
    quantiles: Quantiles = ()
    """Replaces the lognormal distribution."""
    prompt_share: float = 0.5
    """Share of the variance that the prompt explains: samples of a group are alike, but not the same."""
    growth_per_step: float = 0.0
    """Relative growth of all lengths in one step of training."""

    def quantile(self, probability: float) -> float:
        """Return the length that this share of the first step's samples does not exceed."""
        return self.from_normal(NormalDist().inv_cdf(probability), 0)

    def from_normal(self, normal: float, step: int) -> float:
        """Return the length of a sample from a standard normal value."""
        if self.quantiles:
            probabilities, tokens = zip(*self.quantiles, strict=True)
            value = float(np.exp(np.interp(NormalDist().cdf(normal), probabilities, np.log(tokens))))
        else:
            value = self.median * float(np.exp(self.sigma * normal))
        return max(1.0, min(float(self.cap), value * (1.0 + self.growth_per_step) ** step))


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt of one step."""

    id: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Tokens of each completion."""

    @property
    def tokens(self) -> int:
        """Return the tokens to train on: prompts and completions."""
        return sum(self.lengths) + self.prompt_tokens * len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One training job."""

    lengths: Lengths
    train_s_per_token: float
    """Training time per token of the reserved cluster: forward, backward and log-probabilities, over prompts and
    completions."""
    update_s: float = 0.0
    """Time after the last micro-batch: optimizer step and export of the weights, without their upload."""
    prompts: int = 128
    """Groups of a step."""
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (64, 512)
    """Shortest and longest prompt."""
    micro_batch: int = 16
    """Samples that are trained at once."""
    reward_s: float = 0.2
    """Time to score one group."""

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return self.prompts * self.group_size

    @property
    def mean_prompt_tokens(self) -> float:
        """Return the mean length of a prompt."""
        return sum(self.prompt_tokens) / 2

    def groups(self, step: int, seed: int) -> tuple[Group, ...]:
        """Return the groups of one step: the same for every policy."""
        rng = np.random.default_rng([seed, step])
        share = self.lengths.prompt_share
        common = rng.standard_normal((self.prompts, 1)) * share**0.5
        normals = common + rng.standard_normal((self.prompts, self.group_size)) * (1.0 - share) ** 0.5
        prompts = rng.integers(*self.prompt_tokens, size=self.prompts, endpoint=True)
        return tuple(
            Group(
                id=SampleId(JOB_NO, False, step, number, 0).pack(),
                prompt_tokens=int(prompts[number]),
                lengths=tuple(round(self.lengths.from_normal(float(normal), step)) for normal in normals[number]),
            )
            for number in range(self.prompts)
        )
