"""Means over seeds, and ratios between policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rlboost.simulation.result import SimulationResult

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
