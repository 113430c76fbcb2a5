"""When the trainer warns about a job's learning, and when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlboost.services.trainer.domain.warnings import CLEAR_STEPS, WINDOW_STEPS, Change, JobFacts, WarningTracker
from rlboost.shared.job.spec import parse
from tests.support.jobs import held_out

FACTS = JobFacts(
    "j-1", prompts_per_step=32, group_size=8, limits="sampling.max_tokens is 256", held_out=(held_out(samples=200),)
)


def rl(reward: float = 0.5, **changes: Any) -> dict[str, float]:
    """Return the metrics of a healthy step of 0/1 rewards."""
    row = {
        "reward/mean": reward,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "frac_reward_zero_std": 0.2,
        "completions/clipped_ratio": 0.01,
        "completions/mean_length": 50.0,
        "entropy": 0.4,
        "groups/dropped_ratio": 0.0,
        "tokens/trained": 5_000.0,
        "grad_norm": 0.2,
        "lr": 1e-4,
        "loss": -0.1,
    }
    return row | {name.replace("__", "/"): value for name, value in changes.items()}


def equal(reward: float) -> dict[str, float]:
    """Return the metrics of a step in which every completion got the same reward."""
    return rl(reward, reward__min=reward, reward__max=reward, frac_reward_zero_std=1.0)


def sft(loss: float, grad_norm: float = 1.0) -> dict[str, float]:
    return {"loss": loss, "perplexity": 2.0, "lr": 1e-4, "grad_norm": grad_norm, "tokens/trained": 100.0}


def dpo(loss: float) -> dict[str, float]:
    return {"loss": loss, "rewards/accuracies": 0.5, "lr": 1e-6, "grad_norm": 1.0, "tokens/trained": 100.0}


def evaluated(pass_at_8: float) -> dict[str, float]:
    """Return the metrics of an evaluation with partial rewards, of whose 200 completions few or none pass."""
    return {"eval/reward_mean": 0.3, "eval/pass@1": pass_at_8 / 8, "eval/pass@8": pass_at_8}


def dropped(ratio: float, **reasons: float) -> dict[str, float]:
    return rl(groups__dropped_ratio=ratio) | {f"groups/dropped/{name}": n for name, n in reasons.items()}


def changes(rows: Sequence[dict[str, float]], facts: JobFacts = FACTS) -> list[tuple[int, Change]]:
    tracker = WarningTracker(facts)
    return [(step, change) for step, row in enumerate(rows) for change in tracker.observe(step, row)]


def raised(rows: Sequence[dict[str, float]], facts: JobFacts = FACTS) -> list[tuple[int, str]]:
    return [(step, change.finding.name) for step, change in changes(rows, facts) if change.holds]


RISING = [rl(0.15 + 0.05 * step, eval__reward_mean=0.1) for step in range(15)]
LOW_ENTROPY = {"entropy": 0.005}


@pytest.mark.parametrize(
    "rows",
    [
        RISING,
        [*RISING, *[rl(0.97, frac_reward_zero_std=0.9, **LOW_ENTROPY)] * 5],
        [rl(0.9)] * 3 + [rl(0.6)] * 5,
        [rl(0.02, completions__mean_length=2.0, entropy=0.1)] * 8,
        [equal(0.0), equal(0.0), rl(0.01), equal(0.0), equal(0.0)],
        [dropped(0.25, timeout=8.0), rl(), dropped(0.25, timeout=8.0)],
        [rl(kl=0.3)] * 5,
        [rl(mismatch_kl=0.02, off_policy__staleness_max=0.0), rl(mismatch_kl=0.005, off_policy__staleness_max=0.0)] * 3,
        [rl(mismatch_kl=0.05, off_policy__staleness_max=1.0)] * 5,
        [rl(completions__masked_ratio=1.0), rl(completions__masked_ratio=0.99)] * 3,
        [rl(0.02, eval__reward_mean=0.0)] * 3,
        [sft(2.0 - 0.1 * step) for step in range(15)],
        [{"eval/reward_mean": 0.0}],
        [rl(0.3, **evaluated(pass_at_8=0.01))] * 3,
    ],
    ids=[
        "rising",
        "solved",
        "noise",
        "short answers",
        "chance",
        "one slow step",
        "kl",
        "noisy mismatch",
        "older weights",
        "some masked",
        "hard",
        "sft",
        "eval job",
        "some pass",
    ],
)
def test_a_healthy_job_has_no_warning(rows: list[dict[str, float]]) -> None:
    assert raised(rows) == []


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        ([equal(0.0)] * 6, (2, "no_learning_signal")),
        ([*RISING, *[equal(1.0)] * 3], (17, "no_learning_signal")),
        ([rl(frac_reward_zero_std=1.0)] * 4, (2, "no_learning_signal")),
        ([dropped(0.5, raised=16.0)], (0, "many_groups_dropped")),
        ([dropped(0.3, raised=9.0)] * 2, (1, "many_groups_dropped")),
        ([rl(completions__clipped_ratio=0.95)] * 3, (2, "completions_clipped")),
        ([rl(completions__clipped_ratio=1.0, completions__masked_ratio=1.0)] * 3, (2, "completions_masked")),
        ([rl()] * 4 + [rl(0.3, **LOW_ENTROPY)] * 3, (6, "entropy_collapsed")),
        ([rl(0.6)] * 4 + [rl(0.1)] * 3, (5, "reward_fell")),
        ([rl(kl=0.1)] + [rl(kl=2.0)] * 3, (3, "kl_exploded")),
        ([rl(mismatch_kl=0.002)] + [rl(mismatch_kl=0.02)] * 3, (3, "engine_differs")),
        ([rl(mismatch_kl=0.2, off_policy__staleness_max=1.0)] * 3, (2, "engine_differs")),
        ([rl(grad_norm=0.0)] * 3, (2, "gradient_zero")),
        ([rl(eval__reward_mean=0.0), rl(), rl(eval__reward_mean=0.0)], (2, "eval_reward_zero")),
        ([rl(0.3, **evaluated(pass_at_8=0.0))], (0, "nothing_passes")),
        ([sft(2.0)] * 3 + [sft(4.0)] * 3, (5, "loss_rose")),
        ([dpo(0.7)] * 3 + [dpo(1.4)] * 3, (5, "loss_rose")),
        ([sft(0.0, grad_norm=0.0)] * 3, (2, "gradient_zero")),
    ],
)
def test_a_job_in_trouble_has_one_warning(rows: list[dict[str, float]], at: tuple[int, str]) -> None:
    assert raised(rows) == [at]


@pytest.mark.parametrize(("ratio", "share"), [(1.0, "all completions of each"), (0.95, "95.0% or more of the compl")])
def test_clipped_completions_are_counted_in_words(ratio: float, share: str) -> None:
    (_, change), *_ = changes([rl(completions__clipped_ratio=ratio)] * 3)
    assert change.finding.seen.startswith(share)


def test_rewards_that_do_not_differ_across_a_batch_are_a_signal_for_batch_statistics() -> None:
    batch = JobFacts("j-1", compares_within_groups=False)
    assert raised([rl(frac_reward_zero_std=1.0)] * 4, batch) == []
    assert raised([equal(0.0)] * 4, batch) == [(2, "no_learning_signal")]


def test_equal_rewards_and_distance_from_a_teacher_are_no_trouble() -> None:
    taught = JobFacts("j-1", has_teacher=True)
    assert raised([equal(0.0)] * 4, taught) == raised([rl(kl=2.0)] * 4, taught) == []


def test_a_length_penalty_is_a_signal_though_rewards_are_equal() -> None:
    assert raised([equal(0.0) | {"reward/overlong_penalty": 0.1}] * 4) == []


def test_small_evaluation_without_a_pass_needs_a_second_one() -> None:
    """The undertrained warm-up: rewards differ from the first step, and no completion is ever right."""
    facts = JobFacts("j-1", prompts_per_step=32, group_size=8, held_out=(held_out(samples=60, pass_reward=0.9),))
    rows = [rl(0.3, **evaluated(0.0)), *[rl(0.3)] * 9, rl(0.31, **evaluated(0.0))]
    [(at, change)] = changes(rows, facts)
    assert at == 10
    text = change.finding.text
    assert [
        word for word in ("120 completions", "reward of 0.9", "kind: sft", "samples j-1 --eval") if word not in text
    ] == []
    rows += [rl(0.4, **evaluated(0.1)), *[rl(0.4)] * CLEAR_STEPS]
    assert [(change.finding.name, change.holds) for _, change in changes(rows, facts)] == [
        ("nothing_passes", True),
        ("nothing_passes", False),
    ]


def test_falling_reward_under_a_curriculum_raises_no_warning() -> None:
    rows = [rl(0.6)] * 4 + [rl(0.1)] * 3
    assert raised(rows, JobFacts("j-1", prompts_per_step=32, has_curriculum=True)) == []


def test_falling_reward_of_few_prompts_raises_no_warning() -> None:
    rows = [rl(0.6)] * 4 + [rl(0.1)] * 3
    assert raised(rows, JobFacts("j-1", prompts_per_step=2)) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (equal(0.0), ["reward 0", "too hard", "rlboost samples j-1"]),
        (equal(1.0), ["reward 1", "solved"]),
        (dropped(0.5, stale=12.0, raised=4.0), ["50%", "stale (12", "elastic.max_staleness"]),
        (dropped(0.5, raised=16.0), ["raised (16", "rlboost logs j-1"]),
        (dropped(0.5, timeout=16.0), ["reward.timeout_s"]),
        (dropped(0.5, environment_raised=16.0), ["environment.function"]),
        (rl(completions__clipped_ratio=1.0), ["sampling.max_tokens is 256", "end token"]),
        (rl(completions__masked_ratio=1.0), ["sampling.max_tokens is 256", "remove algorithm.mask_truncated"]),
    ],
)
def test_warning_has_numbers_causes_and_remedy(row: dict[str, float], words: list[str]) -> None:
    tracker = WarningTracker(FACTS)
    for step in range(WINDOW_STEPS):
        tracker.observe(step, row)
    [text] = tracker.warnings
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (equal(0.0), ["mean reward of 0.5", "optimizer.lr"]),
        (rl(completions__clipped_ratio=0.95), ["1% in the first step", "optimizer.lr"]),
    ],
)
def test_a_warning_names_the_updates_where_it_went_well_before(row: dict[str, float], words: list[str]) -> None:
    tracker = WarningTracker(FACTS)
    for step, one in enumerate([rl(0.5), *[row] * WINDOW_STEPS]):
        tracker.observe(step, one)
    [text] = tracker.warnings
    assert [word for word in words if word not in text] == [], text


def test_one_lucky_reward_before_does_not_blame_the_updates() -> None:
    tracker = WarningTracker(FACTS)
    for step, one in enumerate([rl(0.001), *[equal(0.0)] * WINDOW_STEPS]):
        tracker.observe(step, one)
    [text] = tracker.warnings
    assert "too hard" in text


def test_a_warning_is_raised_once_and_cleared_after_good_steps() -> None:
    rows = [equal(0.0)] * 10 + [rl()] * 10
    at = [(step, change.holds) for step, change in changes(rows)]
    assert at == [(2, True), (10 + CLEAR_STEPS - 1, False)]


def test_single_good_steps_do_not_raise_a_warning_again() -> None:
    rows = ([equal(0.0)] * 3 + [rl()]) * 5
    assert raised(rows) == [(2, "no_learning_signal")]


@pytest.mark.parametrize(("metric", "name"), [(0.0, "eval_reward_zero"), (0.3, "nothing_passes")])
def test_warning_about_one_of_several_sets_names_it(metric: float, name: str) -> None:
    aime = held_out(name="aime", samples=200, pass_reward=0.9)
    aime = aime._replace(rows=aime.rows._replace(field="eval.sets.aime.data"))
    facts = JobFacts("j-1", prompts_per_step=32, group_size=8, held_out=(held_out(samples=200), aime))
    both = {"eval/reward_mean": 0.4, "eval/pass@1": 0.4, "eval/aime/reward_mean": metric, "eval/aime/pass@1": 0.0}
    tracker = WarningTracker(facts)
    changes = [change for step in range(2) for change in tracker.observe(step, rl(0.5, **both))]
    finding = {change.finding.name: change.finding for change in changes}[name]
    expected = {
        "eval_reward_zero": ("eval/aime/reward_mean was 0", "rows of eval.sets.aime.data"),
        "nothing_passes": ("evaluation on aime got a reward of 0.9", "set eval.sets.aime.pass_reward"),
    }
    assert [text for text in expected[name] if text not in finding.text] == []


def test_the_final_evaluation_clears_no_warning() -> None:
    tracker = WarningTracker(FACTS)
    for step in range(3):
        tracker.observe(step, equal(0.0))
    for step in range(3, 10):
        assert tracker.observe(step, {"eval/reward_mean": 0.0}) == []
    assert len(tracker.warnings) == 1


def test_replayed_rows_restore_the_state() -> None:
    rows = [*RISING, *[equal(0.0)] * 4]
    tracker = WarningTracker(FACTS)
    for step, row in enumerate(rows):
        tracker.observe(step, row)
    before = tracker.warnings
    assert before
    assert [tracker.observe(step, row) for step, row in enumerate(rows)] == [[]] * len(rows)
    assert tracker.warnings == before


@pytest.mark.parametrize("kind", ["rl", "sft", "eval"])
def test_the_facts_of_every_kind_of_job(kind: str) -> None:
    raw: dict[str, Any] = {"kind": kind, "model": "m", "data": {"train": "t.jsonl", "prompts_per_step": 3}, "steps": 2}
    if kind == "rl":
        raw |= {"reward": {"function": "m:f"}, "algorithm": {"name": "ppo"}, "sampling": {"max_tokens": 7}}
    if kind == "eval":
        raw = {"kind": kind, "model": "m", "data": {"eval": "e"}, "reward": {"function": "m:f"}, "eval": {"samples": 2}}
    facts = JobFacts.of("j-1", parse(raw))
    assert (facts.prompts_per_step, facts.compares_within_groups) == ((3, False) if kind == "rl" else (1, True))
    assert ("7" in facts.limits) == (kind == "rl")
