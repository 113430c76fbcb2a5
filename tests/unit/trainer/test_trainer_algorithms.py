"""The choices that an algorithm is made of, each against a few lines of numpy from its paper; and the job file's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.advantages import (
    NEED_THE_STEP,
    centered,
    group_advantages,
    leave_one_out,
    overlong_penalty,
)
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.services.trainer.domain.loss.policy import divisor, factor, k1, k2, k3, masked, truncated
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import GROUPLESS, PRESETS, Aggregation, AlgorithmSpec, CriticSpec
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import parse, to_json
from tests.support.jobs import job_file, parse_rl, with_teacher

Groups = list[list[float]]
rewards = st.floats(-10, 10).map(lambda value: round(value, 3))
groups_of = st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=6)


def papers(kind: str, groups: Groups) -> list[np.ndarray[Any, Any]]:
    arrays = [np.array(group) for group in groups]
    if kind == "group_std":
        return [(r - r.mean()) / (r.std(ddof=1) + 1e-4) for r in arrays]
    if kind == "group_mean":
        return [r - r.mean() for r in arrays]
    if kind == "leave_one_out":
        return [np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]) for r in arrays]
    if kind == "group_mean_batch_std":
        arrays = [r - r.mean() for r in arrays]
    everything = np.concatenate(arrays)
    return [(r - everything.mean()) / (everything.std() + 1e-8) for r in arrays]


KINDS = ["group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std"]


@pytest.mark.parametrize("kind", KINDS)
@given(groups_of)
def test_advantages_are_those_of_the_paper(kind: str, groups: Groups) -> None:
    flat = [reward for group in groups for reward in group]
    spread = kind not in NEED_THE_STEP or np.std(flat) > 1e-3 < max(np.std(group) for group in groups)
    for ours, expected in zip(group_advantages(kind, groups, drop_equal=False), papers(kind, groups), strict=True):
        if spread:
            assert ours is not None
            np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(groups_of, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_groups(kind: str, groups: Groups, random: Any) -> None:
    order = random.sample(range(len(groups)), len(groups))
    there = group_advantages(kind, groups, drop_equal=True)
    other = group_advantages(kind, [groups[i] for i in order], drop_equal=True)
    assert other == [there[i] for i in order]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - NEED_THE_STEP))
@given(groups_of)
def test_group_local_advantages_do_not_depend_on_other_groups(kind: str, groups: Groups) -> None:
    alone = [group_advantages(kind, [group], drop_equal=True)[0] for group in groups]
    assert alone == group_advantages(kind, groups, drop_equal=True)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_equal_rewards_are_left_out_or_count(kind: str) -> None:
    groups = [[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]
    first, second, third = group_advantages(kind, groups, drop_equal=True)
    assert second is None
    assert [first, third] == group_advantages(kind, [groups[0], groups[2]], drop_equal=False)
    assert group_advantages(kind, groups, drop_equal=False)[1] is not None
    assert group_advantages(kind, [[1.0, 1.0]], drop_equal=False) == [[0.0, 0.0]]
    assert group_advantages(kind, [[1.0, 1.0]], drop_equal=True) == [None]


def test_leave_one_out_is_the_centered_reward_times_n_over_n_minus_1() -> None:
    group = [1.0, 0.0, 0.5, 2.0]
    assert leave_one_out(group) == pytest.approx([value * 4 / 3 for value in centered(group)])


def test_the_soft_overlong_punishment_is_dapos() -> None:
    """Equation 13 with L_max 20,480 and L_cache 4,096, the paper's own."""
    expected = {16_384: 0.0, 100: 0.0, 18_432: 0.5, 20_480: 1.0, 17_408: 0.25}
    for length, penalty in expected.items():
        assert overlong_penalty(length, 20_480, 4_096 / 20_480, 1.0) == pytest.approx(penalty, abs=1e-9)
    assert overlong_penalty(20_480, 20_480, 0.2, 0.5) == pytest.approx(0.5)


def test_k1_and_k3_are_the_kl_on_average_and_k2_has_its_gradient() -> None:
    """Averages over a whole vocabulary of 7, exactly: sum of p k."""
    logits = torch.tensor(np.random.default_rng(0).standard_normal(7), requires_grad=True)
    reference = torch.tensor(np.random.default_rng(1).standard_normal(7)).log_softmax(-1)

    def gradient(of: Any) -> torch.Tensor:
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    logprobs = logits.log_softmax(-1)
    p = logprobs.exp()
    kl = (p * (logprobs - reference)).sum()
    for estimator in (k1, k3):
        assert (p * estimator(logprobs, reference)).sum().item() == pytest.approx(kl.item(), abs=1e-9)
    torch.testing.assert_close(gradient((p.detach() * k2(logprobs, reference)).sum()), gradient(kl))
    assert gradient((p.detach() * k1(logprobs, reference)).sum()).abs().max() < 1e-12
    assert (k3(logprobs, reference) >= 0).all()


def test_importance_weights_are_cut_or_masked() -> None:
    weights = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0])
    assert truncated(weights, 2.0).tolist() == pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0])
    assert masked(weights, 2.0).tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0, 0.0])


def test_aggregation_factors_and_divisors_have_the_expected_values() -> None:
    lengths, most = (3, 1, 4), 8
    per_completion = {kind: [n * factor(kind, n, most) for n in lengths] for kind in _AGGREGATIONS}
    assert per_completion["token_mean"] == per_completion["sequence_sum"] == [3, 1, 4]
    assert per_completion["sequence_mean"] == pytest.approx([1, 1, 1])
    assert per_completion["constant"] == pytest.approx([3 / 8, 1 / 8, 4 / 8])
    assert [divisor(kind, lengths) for kind in _AGGREGATIONS] == [8, 3, 3, 3]


_AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def test_numbers_add_up_and_maxima_stay_maxima() -> None:
    total: dict[str, float] = {}
    for part in ({"loss": 1.0, "max_ratio": -2.0}, {"loss": 0.5, "max_ratio": -3.0}, {"kl": 1.0, "max_ratio": -2.5}):
        add_sums(total, part)
    assert total == {"loss": 1.5, "max_ratio": -2.0, "kl": 1.0}


# --- the job file -----------------------------------------------------------------------------------------------------


def job(**algorithm: Any) -> dict[str, Any]:
    return job_file(algorithm=with_teacher(**algorithm), steps=1)


def chosen(**algorithm: Any) -> AlgorithmSpec:
    return parse_rl(job(**algorithm)).algorithm


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_chooses_and_survives_the_journey_to_the_trainer(name: str) -> None:
    spec = parse_rl(job(name=name))
    assert parse(json.loads(to_json(spec))) == spec
    applying = {key: value for key, value in PRESETS[name].items() if getattr(spec.algorithm, key) is not None}
    assert {key: getattr(spec.algorithm, key) for key in applying} == applying


def test_without_a_word_it_is_grpo_as_ever() -> None:
    spec = AlgorithmSpec()
    assert spec == chosen() == chosen(name="grpo")
    assert (spec.advantage, spec.ratio, spec.clip, spec.aggregation) == ("group_std", "token", "ppo", "token_mean")
    assert (spec.clip_low, spec.clip_high, spec.tis_cap, spec.kl_coef, spec.group_size) == (0.2, 0.28, 2.0, 0.0, 8)
    assert (spec.equal_groups, spec.old_logprobs, spec.importance) == ("drop", "auto", "truncate")


def test_demo_job_keeps_the_defaults_but_group_size_and_updates() -> None:
    spec = parse_rl(load("examples/countdown/job.yaml")).algorithm
    assert spec == chosen(group_size=8, updates_per_step=2)


def test_each_choice_of_a_preset_can_be_another() -> None:
    spec = chosen(name="gspo", aggregation="token_mean", clip_low=0.01, kl_coef=0.1, equal_groups="drop")
    assert (spec.ratio, spec.aggregation, spec.clip_low, spec.clip_high) == ("sequence", "token_mean", 0.01, 4e-4)
    assert (spec.kl_estimator, spec.equal_groups) == ("k3", "drop")
    assert chosen(name="reinforce++", kl_coef=0.1).kl_estimator == "k2"
    assert chosen(clip="none").clip_low is None
    assert chosen(name="rloo", clip="ppo", clip_high=0.2).clip_high == 0.2
    assert chosen(overlong_penalty=1.0).overlong_fraction == 0.2
    assert chosen(tis_cap=False).importance is None
    assert chosen(name="ppo", critic={"lr": 1e-3}).critic == CriticSpec(lr=1e-3)
    assert chosen(name="ppo", critic={"value_clip": False}).critic == CriticSpec(value_clip="off")
    assert chosen(name="ppo", kl_coef=0.1).kl_estimator is None
    assert chosen(advantage="gae").critic == CriticSpec()
    assert chosen(advantage="best_worst", preference={"beta": 0.5}) == chosen(
        advantage="best_worst", preference={"beta": 0.5, "variant": "sigmoid"}
    )


def test_a_critic_is_refused_where_it_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"gae trains a critic, which needs trainer\.backend: torch"):
        parse({**job(name="ppo"), "trainer": {"backend": "megatron"}})
    assert parse({**job(name="ppo"), "trainer": {"data_parallel": 4, "context_parallel": 2, "fsdp_size": 4}})


@pytest.mark.parametrize(
    ("algorithm", "needs"), [({}, False), ({"kl_coef": 0.1}, True), ({"name": "ppo"}, False), ({"name": "dpo"}, True)]
)
def test_the_starting_weights_are_kept_where_they_are_asked(algorithm: dict[str, Any], needs: bool) -> None:
    assert chosen(**algorithm).needs_reference is needs
    assert not chosen(name="dpo").is_decoupled(1), "what is compared with is not what drew the tokens"


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"name": "rloo", "clip_low": 0.2}, "clip_low does not apply, nothing is clipped: set algorithm.clip to"),
        ({"clip": "none", "clip_high": 0.2}, "clip_high does not apply"),
        ({"kl_estimator": "k1"}, "kl_estimator does not apply, no KL penalty is taken: set algorithm.kl_coef above 0"),
        ({"overlong_fraction": 0.1}, "overlong_fraction does not apply"),
        ({"tis_cap": "off", "importance": "mask"}, "importance does not apply, importance weights are off"),
        ({"loss": "m:f", "clip": "ppo"}, "clip does not apply, algorithm.loss takes the place of ratio and clip"),
        ({"loss": "m:f", "clip_low": 0.1}, "clip_low does not apply"),
        ({"clip_low": None}, "clip_low is missing: give it, or leave the key out for grpo's own"),
        ({"importance": "mask", "tis_cap": 0.5}, "give more than 1"),
        ({"tis_cap": "off", "rollout_is": "token"}, "rollout_is does not apply, importance weights are off"),
        ({"rollout_rs": {}}, "nothing is rejected: set level or token_veto"),
        ({"rollout_rs": {"threshold": 3}}, "threshold does not apply, no ratio is bounded: set level"),
        ({"rollout_rs": {"level": "geometric", "threshold": 0.9}}, "algorithm.rollout_rs.threshold"),
        (
            {"name": "dpo", "rollout_rs": {"level": "token"}},
            "rollout_rs does not apply, pairs have",
        ),
        ({"loss": "module"}, "not of the form package.module:function"),
        ({"name": "vpg"}, "algorithm.name: 'vpg' is unknown: use 'grpo', 'dr_grpo'"),
        ({"critic": {"lr": 1e-4}}, "critic does not apply, there is no critic: set algorithm.advantage to gae"),
        ({"name": "dpo", "critic": {}}, "critic does not apply"),
        ({"name": "ppo", "preference": {}}, "preference does not apply, nothing is preferred: set algorithm.advantage"),
        ({"name": "ppo", "critic": None}, "critic is missing: give it, or leave the key out for ppo's own"),
        ({"name": "ppo", "critic": {"gae_lambda": 2}}, "algorithm.critic.gae_lambda"),
        ({"name": "ppo", "critic": {"warmup": 2}}, "algorithm.critic.warmup: unknown key"),
        (
            {"name": "ppo", "kl_coef": 0.1, "kl_estimator": "k3"},
            "kl_estimator does not apply, with a critic the penalty",
        ),
        (
            {"name": "dpo", "clip_low": 0.1},
            "clip_low does not apply, pairs have a loss of their own: set algorithm.adv",
        ),
        ({"name": "dpo", "ratio": "token"}, "ratio does not apply, pairs have a loss of their own"),
        ({"name": "dpo", "aggregation": "token_mean"}, "aggregation does not apply"),
        ({"name": "dpo", "equal_groups": "keep"}, "equal_groups does not apply"),
        ({"name": "dpo", "old_logprobs": "sampled"}, "old_logprobs does not apply"),
        ({"name": "dpo", "tis_cap": "off"}, "tis_cap does not apply"),
        (
            {"name": "dpo", "kl_coef": 0.1},
            "kl_coef does not apply, pairs have a loss of their own, which preference.beta",
        ),
        ({"name": "dpo", "loss": "m:f"}, "loss does not apply, pairs have a loss of their own"),
        ({"name": "dpo", "preference": {"variant": "ipo", "label_smoothing": 0.1}}, "label_smoothing does not apply"),
        ({"name": "dpo", "preference": {"beta": 0}}, "algorithm.preference.beta"),
        ({"aggregation": None}, "aggregation is missing: give it, or leave the key out for grpo's own"),
        ({"name": ["grpo"]}, "algorithm.name"),
        (
            {"name": "dpo", "entropy_coef": 0.01},
            "entropy_coef does not apply, pairs have a loss of their own, which preference.beta",
        ),
        ({"entropy_coef": -0.01}, "algorithm.entropy_coef"),
        ({"kl_coef": "much"}, "algorithm.kl_coef"),
        ({"clip_low": 2}, "algorithm.clip_low"),
        ({"epsilon": 0.2}, "algorithm.epsilon: unknown key"),
    ],
)
def test_inapplicable_algorithm_setting_is_refused_with_the_remedy(algorithm: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(job(**algorithm))
    assert text in str(caught.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_single_sample_is_refused_without_a_comparison(name: str) -> None:
    if PRESETS[name]["advantage"] in GROUPLESS:
        assert chosen(name=name, group_size=1).group_size == 1
        with pytest.raises(ConfigError, match="a step of one sample has nothing to compare with"):
            parse({**job(name=name, group_size=1), "data": {"train": "t", "prompts_per_step": 1}})
    else:
        with pytest.raises(ConfigError, match=r"a group of one has nothing to compare with.*reinforce\+\+"):
            chosen(name=name, group_size=1)


def test_the_estimators_that_need_the_step_are_those_that_normalise_over_it() -> None:
    needy = {preset["advantage"] for name, preset in PRESETS.items() if name.startswith(("reinforce++", "ppo"))}
    assert needy == NEED_THE_STEP
