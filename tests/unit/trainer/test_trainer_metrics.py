from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.metrics import (
    Durations,
    RolloutTally,
    StepTally,
    TrainingHardware,
    flops_per_token,
    peak_flops,
)
from rlboost.shared.messages import SampleFinished
from rlboost.shared.wire import F32, I32, pack
from tests.support.jobs import held_out


def sample(n: int, *, finish: str = "stop", logprob: float = -0.5, old: int = 0) -> SampleFinished:
    return SampleFinished(
        sample=1,
        tokens=pack([1] * n, I32),
        logprobs=pack([logprob] * n, F32),
        finish="length" if finish == "length" else "stop",
        spans=[("w", 7, n - old), ("v", 5, old)],
        attempts=1,
        group_done=False,
    )


def test_the_rows_names_are_the_fields() -> None:
    rollouts = RolloutTally(
        scored=[
            ScoredGroup(1, (sample(2), sample(4, finish="length", old=3)), (1.0, 0.0)),
            ScoredGroup(1, (sample(3), sample(3)), (1.0, 1.0)),
        ],
        evaluated=[ScoredGroup(1, (sample(8),), (0.25,), held_out=held_out())],
        duplicates=3,
        measured={"data/skipped_solved": 3},
        penalties=[0.0, 0.5, 0.0, 0.5],
    )
    tally = StepTally(
        step=7,
        rollouts=rollouts,
        loss_sums={
            "tokens": 6.0,
            "loss": -3.0,
            "clipped_low": 1.0,
            "clipped_high": 2.0,
            "divisor": 3.0,
            "abs_log_ratio": 0.6,
            "kl": 0.06,
            "ratio": 9.0,
            "max_ratio": 4.0,
            "ratio_clipped": 6.6,
            "max_ratio_clipped": 1.28,
            "mismatch_kl": 0.5,
            "mismatch_tokens": 2.0,
            "reference_kl": 1.5,
            "all_tokens": 50.0,
        },
        measured={"data/skipped_failed": 1},
        hardware=TrainingHardware(n_devices=5, flops_per_token=1e12, peak_flops=1e14),
        grad_norms=[1.0, 3.0],
        learning_rate=1e-3,
        durations=Durations(seeding_s=1.0, wait_s=0.5, train_s=0.25, publish_s=0.125, step_s=2.0),
    )
    rollouts.dropped["timeout"] += 2
    rollouts.replaced["equal_rewards"] += 1
    tally.excluded["equal_rewards"] += 2
    assert tally.metrics() == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/std": math.sqrt(0.5) / 2,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 3.0,
            "completions/max_length": 4.0,
            "completions/clipped_ratio": 0.25,
            "tokens/completion": 12.0,
            "entropy": 0.5,
            "off_policy/staleness": 0.5,
            "off_policy/staleness_max": 2.0,
            "loss": -1.0,
            "ratio/mean": 1.5,
            "ratio/max": 4.0,
            "ratio/mean_clipped": 1.1,
            "ratio/max_clipped": 1.28,
            "mismatch_kl": 0.25,
            "kl": 0.25,
            "clip_ratio/low": 1 / 6,
            "clip_ratio/high": 1 / 3,
            "off_policy/abs_log_ratio": 0.1,
            "off_policy/kl": 0.01,
            "tokens/trained": 6.0,
            "grad_norm": 2.0,
            "lr": 1e-3,
            "eval/reward_mean": 0.25,
            "eval/mean_length": 8.0,
            "eval/pass@1": 0.0,
            "samples/duplicates": 3.0,
            "groups/dropped": 2.0,
            "groups/dropped_ratio": 0.4,
            "groups/dropped/timeout": 2.0,
            "groups/excluded/equal_rewards": 3.0,
            "reward/overlong_penalty": 0.25,
            "time/step_s": 2.0,
            "time/seeding_s": 1.0,
            "time/wait_s": 0.5,
            "time/train_s": 0.25,
            "time/publish_s": 0.125,
            "perf/tokens_per_s": 10.0,
            "perf/throughput": 5.0,
            "perf/mfu": 0.4,
            "data/skipped_solved": 3.0,
            "data/skipped_failed": 1.0,
        }
    )


def test_optional_loss_metrics_appear_only_with_their_sums() -> None:
    sums = {"tokens": 8.0, "divisor": 8.0, "loss": 0.0, "max_ratio": 1.0}
    row = StepTally(loss_sums=dict(sums)).metrics()
    some = {"off_policy/tis_capped", "clip_ratio/low", "ratio/max_clipped", "mismatch_kl", "kl"}
    assert not some & set(row)
    assert StepTally(loss_sums={**sums, "tis_capped": 2.0}).metrics()["off_policy/tis_capped"] == 0.25


def test_empty_tally_has_no_reward_loss_or_evaluation_metrics() -> None:
    row = StepTally().metrics()
    assert not {name for name in row if name.startswith(("reward", "eval", "loss", "completions"))}
    assert all(isinstance(value, float) for value in row.values())


def test_reward_function_mean_covers_only_its_own_samples() -> None:
    first = ScoredGroup(1, (sample(2), sample(2)), (1.0, 2.0), {"right": (1.0, 0.0), "short": (None, 4.0)})
    second = ScoredGroup(1, (sample(2), sample(2)), (1.0, 1.0), {"right": (1.0, 1.0), "short": (None, None)})
    row = StepTally(
        step=7, rollouts=RolloutTally(scored=[first, second], evaluated=[replace(second, held_out=held_out())])
    ).metrics()
    assert {name: value for name, value in row.items() if "right" in name or "short" in name} == {
        "reward/right/mean": 0.75,
        "reward/short/mean": 4.0,
        "eval/reward/right/mean": 1.0,
    }


def test_utilization_is_reported_only_with_a_known_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA L40", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None
    assert set(TrainingHardware(flops_per_token=1.0).metrics(10.0, 2.0, 1.0)) == {"perf/throughput"}
    assert flops_per_token(100, frozen=False) == 600.0
    assert flops_per_token(100, frozen=True) == 400.0


def test_tokens_by_worker_count_the_spans_of_all_samples() -> None:
    scored = [ScoredGroup(1, (sample(2), sample(4, old=3)), (1.0, 0.0))]
    rollouts = RolloutTally(
        scored=scored, evaluated=[ScoredGroup(1, (sample(8, old=2),), (0.25,), held_out=held_out())]
    )
    assert StepTally(rollouts=rollouts).tokens_by_worker() == {"w": 2 + 1 + 6, "v": 3 + 2}
