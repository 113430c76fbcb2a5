"""The trainer's metrics for Prometheus: steps, the time of their phases, and what the last step measured."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

PHASES = ("seeding", "wait", "train", "publish")
SHOWN = (
    *("reward/mean", "reward/std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
    *("entropy", "loss", "grad_norm", "lr", "kl", "off_policy/staleness", "groups/dropped_ratio"),
    *("perf/tokens_per_s", "eval/reward_mean", "eval/pass@1"),
)
"""Metrics of the run log that are exported. A fixed list: jobs may report any number of others."""
_STEPS = Counter("rlboost_trainer_steps", "Training steps finished by this process")
_PHASES = Counter("rlboost_trainer_phase_seconds", "Time of finished steps by phase", ["phase"])
_LAST = Gauge("rlboost_trainer_step_metric", "Main metrics of the last step, named as in the run log", ["name"])


def observe_step(metrics: Mapping[str, float], *, trained: bool) -> None:
    """Export a finished training step, or an evaluation after the last one."""
    _STEPS.inc(trained)
    for phase in PHASES:
        _PHASES.labels(phase).inc(metrics.get(f"time/{phase}_s", 0.0))
    _LAST.clear()
    for name in SHOWN:
        if name in metrics:
            _LAST.labels(name).set(metrics[name])
