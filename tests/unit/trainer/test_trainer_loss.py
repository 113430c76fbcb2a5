"""Each algorithm's loss against its paper's formula in numpy, and its gradient against finite differences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.loss.policy import PolicyLoss, accepted, engine_ratios, job_loss
from rlboost.shared.errors import Fatal
from rlboost.shared.job.algorithm import PRESETS, RejectionLevel, RejectionSpec
from rlboost.shared.job.spec import RlJob
from tests.support.jobs import parse_rl, with_teacher
from tests.support.losses import clipped_loss, decoupled_loss

MAX_TOKENS = 9
Array = np.ndarray[Any, np.dtype[np.float64]]


def job(max_staleness: int = 0, **algorithm: Any) -> RlJob:
    return parse_rl(
        {
            "model": "m",
            "data": {"train": "t"},
            "reward": {"function": "m:f"},
            "algorithm": with_teacher(**algorithm),
            "sampling": {"max_tokens": MAX_TOKENS},
            "elastic": {"max_staleness": max_staleness},
            "steps": 1,
        }
    )


class Case(NamedTuple):
    """Columns of one update; `advantages` has one entry a completion."""

    new: Array
    old: Array
    advantages: Array
    lengths: tuple[int, ...]

    def completions(self, new: Array) -> list[tuple[Array, Array, float]]:
        ends = np.cumsum(self.lengths)[:-1]
        return list(zip(np.split(new, ends), np.split(self.old, ends), self.advantages, strict=True))


def a_case(seed: int, spread: float = 0.4) -> Case:
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(1, 8, size=6))
    new = -rng.uniform(0.1, 3, sum(lengths))
    return Case(new, new + spread * rng.standard_normal(sum(lengths)), rng.standard_normal(6), lengths)


def batch(case: Case, dtype: torch.dtype = torch.float64, **columns: Array) -> TokenBatch:
    return TokenBatch(
        torch.tensor(case.new, dtype=dtype, requires_grad=True),
        torch.tensor(case.old, dtype=dtype),
        torch.tensor(np.repeat(case.advantages, case.lengths), dtype=dtype),
        case.lengths,
        **{name: torch.tensor(values, dtype=dtype) for name, values in columns.items()},
    )


def clipped(ratio: Array, advantage: float, low: float, high: float) -> Array:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def token_mean(low: float, high: float) -> Callable[[Case, Array], float]:
    """DAPO, equation 8, over the batch: 1 / sum |o| of the sum over all tokens."""

    def formula(case: Case, new: Array) -> float:
        terms = [clipped(np.exp(pi - old), a, low, high) for pi, old, a in case.completions(new)]
        return -float(np.sum(np.concatenate(terms))) / sum(case.lengths)

    return formula


def dr_grpo(case: Case, new: Array) -> float:
    """Dr. GRPO: 1 / G of the sums over tokens, each over one constant."""
    terms = [clipped(np.exp(pi - old), a, 0.2, 0.2).sum() / MAX_TOKENS for pi, old, a in case.completions(new)]
    return -float(np.mean(terms))


def gspo(case: Case, new: Array) -> float:
    """GSPO, equation 5: 1 / G of min(s A, clip(s) A) with s = (pi(y) / pi_old(y)) ** (1 / |y|)."""
    terms = []
    for pi, old, a in case.completions(new):
        s = (np.prod(np.exp(pi)) / np.prod(np.exp(old))) ** (1 / len(pi))
        terms.append(min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a))
    return -float(np.mean(terms))


def rloo(case: Case, new: Array) -> float:
    """REINFORCE of whole completions: 1 / G of A times the sum over tokens, with the ratio where it has moved."""
    return -float(np.mean([a * np.exp(pi - old).sum() for pi, old, a in case.completions(new)]))


def cispo(case: Case, new: Array) -> float:
    """MiniMax-M1, equation 4, up to 5: the weight is that of the case's own point, a constant."""
    weight = np.minimum(np.exp(case.new - case.old), 5.0)
    return -float(np.sum(weight * np.repeat(case.advantages, case.lengths) * new)) / sum(case.lengths)


PAPERS: dict[str, Callable[[Case, Array], float]] = {
    "grpo": token_mean(0.2, 0.28),
    "dapo": token_mean(0.2, 0.28),
    "reinforce++": token_mean(0.2, 0.2),
    "reinforce++-baseline": token_mean(0.2, 0.2),
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "rloo": rloo,
    "cispo": cispo,
    "ppo": token_mean(0.2, 0.2),
    "distill": token_mean(0.2, 0.28),
}
"""All but DPO's, whose loss is not one of tokens: see `test_trainer_preference`."""


def differences(formula: Callable[[Array], float], at: Array, h: float = 1e-6) -> Array:
    """Central differences of a formula at a point."""
    return np.array([(formula(at + h * unit) - formula(at - h * unit)) / (2 * h) for unit in np.eye(len(at))])


def mean_and_gradient(loss: Any, given: TokenBatch) -> tuple[float, Array]:
    total, sums = loss(given)
    total.backward()
    assert given.logprobs.grad is not None
    return total.item() / sums["divisor"], given.logprobs.grad.numpy() / sums["divisor"]


def test_every_preset_is_held_against_a_formula() -> None:
    assert {*PAPERS, "dpo"} == set(PRESETS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_loss_is_its_papers_and_its_gradient_that_of_finite_differences(name: str, seed: int) -> None:
    case = a_case(seed, spread=1e-3 if name == "gspo" else 0.4)
    value, gradient = mean_and_gradient(job_loss(job(name=name)), batch(case))
    assert value == pytest.approx(PAPERS[name](case, case.new), abs=1e-6)
    expected = differences(lambda new: PAPERS[name](case, new), case.new)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_completions_means_is_grpos_of_the_paper(seed: int) -> None:
    case = a_case(seed)

    def formula(new: Array) -> float:
        return -float(np.mean([clipped(np.exp(p - o), a, 0.2, 0.28).mean() for p, o, a in case.completions(new)]))

    value, gradient = mean_and_gradient(job_loss(job(aggregation="sequence_mean")), batch(case))
    assert value == pytest.approx(formula(case.new), abs=1e-6)
    np.testing.assert_allclose(gradient, differences(formula, case.new), atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(PAPERS) - {"gspo"}))
def test_on_policy_every_gradient_is_minus_the_advantage_as_often_as_it_counts(name: str) -> None:
    case = a_case(0)
    case = case._replace(old=case.new)
    _, gradient = mean_and_gradient(job_loss(job(name=name)), batch(case))
    n, lengths = len(case.lengths), case.lengths
    by = {"dr_grpo": n * MAX_TOKENS, "rloo": n}.get(name, sum(lengths))
    np.testing.assert_allclose(gradient, -np.repeat(case.advantages, lengths) / by, atol=1e-12)


@pytest.mark.parametrize("aged", [False, True])
def test_default_loss_is_bit_exact_with_the_reference_formula(aged: bool) -> None:
    """In float32, in the very operations of the only loss that there was."""
    case = a_case(4)
    given = batch(case, torch.float32, **({"proximal": case.new + 0.1} if aged else {}))
    total, sums = job_loss(job(max_staleness=1 if aged else 0))(given)
    total.backward()
    new = given.logprobs.detach().clone().requires_grad_()
    old = given.proximal if given.proximal is not None else given.sampled
    ratio = (new - old).exp()
    objective = torch.minimum(ratio * given.advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * given.advantages)
    if given.proximal is not None:
        objective = (given.proximal - given.sampled).exp().clamp(max=2.0) * objective
    expected = -objective.sum()
    expected.backward()
    assert total.item() == expected.item()
    assert given.logprobs.grad is not None
    assert new.grad is not None
    assert given.logprobs.grad.equal(new.grad)
    assert sums["divisor"] == sums["tokens"] == sum(case.lengths)


@pytest.mark.parametrize("importance", ["truncate", "mask"])
@pytest.mark.parametrize("seed", range(3))
def test_decoupled_objective_matches_the_formula(seed: int, importance: str) -> None:
    cap = 1.2
    case = a_case(seed)
    proximal = case.old + 0.3 * np.random.default_rng(seed).standard_normal(len(case.old))
    age = np.exp(proximal - case.old)
    weight = np.minimum(age, cap) if importance == "truncate" else np.where((age > cap) | (age < 1 / cap), 0, age)
    advantages = np.repeat(case.advantages, case.lengths)

    def formula(new: Array) -> float:
        ratio = np.exp(new - proximal)
        objective = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
        return -float((weight * objective).sum()) / sum(case.lengths)

    loss = job_loss(job(max_staleness=1, tis_cap=cap, importance=importance))
    value, gradient = mean_and_gradient(loss, batch(case, proximal=proximal))
    assert value == pytest.approx(formula(case.new), abs=1e-6)
    np.testing.assert_allclose(gradient, differences(formula, case.new), atol=1e-6)
    assert loss(batch(case, proximal=proximal))[1]["tis_capped"] == (weight != age).sum() > 0


def test_the_importance_weight_has_no_gradient_and_is_cut_at_the_cap() -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-1.0 - math.log(1.2), -1.0 - math.log(4.0)])
    given = TokenBatch(new, sampled, torch.tensor([0.5, 0.5]), (2,), new.detach().clone())
    total, sums = decoupled_loss(0.2, 0.28, 1.5)(given)
    total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5 * 1.2, -0.5 * 1.5])
    assert sums["tis_capped"] == 1.0


LOG_RATIOS = torch.tensor([0.1, -0.3, 0.5, 0.0, 0.001, -0.001])
"""Two completions of three tokens; sums 0.3 and 0, means 0.1 and 0."""
LENGTHS = (3, 3)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1.10517, 0.74082, 1.64872, 1.0, 1.0010005, 0.9990005]),
        ("sequence", [1.34986] * 3 + [1.0] * 3),
        ("geometric", [1.10517] * 3 + [1.0] * 3),
    ],
)
def test_ratios_of_tokens_and_completions_match_hand_numbers(level: RejectionLevel, expected: list[float]) -> None:
    assert engine_ratios(level, LOG_RATIOS, LENGTHS).tolist() == pytest.approx(expected, abs=1e-5)


def test_sequence_ratio_of_a_long_completion_stays_finite() -> None:
    assert engine_ratios("sequence", torch.full((4096,), 0.5), (4096,)).isfinite().all()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"level": "token"}, [1, 1, 1, 1, 1, 1]),
        ({"level": "token", "threshold": 1.2}, [1, 0, 0, 1, 1, 1]),
        ({"level": "token", "threshold": 1.2, "threshold_lower": 0.7}, [1, 1, 0, 1, 1, 1]),
        ({"level": "sequence", "threshold": 1.3}, [0, 0, 0, 1, 1, 1]),
        ({"level": "sequence", "threshold": 1.4}, [1, 1, 1, 1, 1, 1]),
        ({"level": "geometric", "threshold": 1.11}, [1, 1, 1, 1, 1, 1]),
        ({"level": "geometric", "threshold": 1.01}, [0, 0, 0, 1, 1, 1]),
        ({"token_veto": 0.75}, [0, 0, 0, 1, 1, 1]),
        ({"token_veto": 0.74}, [1, 1, 1, 1, 1, 1]),
        ({"level": "token", "threshold": 1.0005, "token_veto": 0.75}, [0, 0, 0, 1, 0, 0]),
    ],
)
def test_rejection_keeps_tokens_within_its_bounds(spec: dict[str, Any], expected: list[int]) -> None:
    assert accepted(RejectionSpec(**spec), LOG_RATIOS, LENGTHS).int().tolist() == expected


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_rejected_completion_has_no_gradient_and_counts_in_the_divisor(max_staleness: int) -> None:
    new = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    given = TokenBatch(new, new.detach() - LOG_RATIOS, torch.ones(6), LENGTHS, new.detach().clone(), new.detach() - 0.5)
    algorithm = {"kl_coef": 0.1, "rollout_rs": {"level": "geometric", "threshold": 1.01}}
    total, sums = job_loss(job(max_staleness, **algorithm))(given)
    total.backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False] * 3 + [True] * 3
    assert (sums["rejected"], sums["divisor"]) == (3, 6)


def test_sequence_weights_multiply_every_token_of_the_completion() -> None:
    new = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    given = TokenBatch(new, new.detach() - LOG_RATIOS, torch.ones(6), LENGTHS, new.detach().clone())
    total, sums = job_loss(job(1, rollout_is="sequence", tis_cap=1.2))(given)
    total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.2] * 3 + [-1.0] * 3)
    assert sums["tis_capped"] == 3


def test_without_a_cap_older_tokens_are_not_weighed() -> None:
    case = a_case(1)
    given = batch(case, proximal=case.new + 0.2)
    total, sums = decoupled_loss(0.2, 0.28, None)(given)
    assert total.item() == clipped_loss(0.2, 0.28)(replace(given, sampled=torch.as_tensor(given.proximal)))[0].item()
    assert "tis_capped" not in sums


def test_with_a_critic_the_kl_is_in_the_rewards_and_only_measured_here() -> None:
    case = a_case(3)
    reference = case.new + 0.5
    value, gradient = mean_and_gradient(job_loss(job(name="ppo", kl_coef=0.1)), batch(case, reference=reference))
    expected, same = mean_and_gradient(job_loss(job(name="ppo")), batch(case))
    assert value == expected
    np.testing.assert_array_equal(gradient, same)
    sums = job_loss(job(name="ppo", kl_coef=0.1))(batch(case, reference=reference))[1]
    assert sums["reference_kl"] == pytest.approx(KL["k3"](case.new - reference).sum(), abs=1e-6)


def test_a_reference_further_than_floats_reach_breaks_no_loss_that_has_no_penalty() -> None:
    case = a_case(3)
    given = batch(case, torch.float32, reference=case.new + 1e3)
    assert math.isfinite(job_loss(job(name="dpo"))(given)[0].item())


def test_missing_proximal_column_means_the_current_policy() -> None:
    loss, case = decoupled_loss(0.2, 0.28, 1.5), a_case(2)
    implied, given = batch(case), batch(case, proximal=case.new)
    for one in (implied, given):
        loss(one)[0].backward()
    assert implied.logprobs.grad is not None
    assert given.logprobs.grad is not None
    assert implied.logprobs.grad.equal(given.logprobs.grad)
    assert loss(implied)[1] == loss(given)[1]


KL = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("estimator", sorted(KL))
def test_the_kl_penalty_is_added_to_the_loss_and_aggregated_like_it(estimator: str, name: str) -> None:
    case = a_case(3, spread=1e-3 if name == "gspo" else 0.4)
    reference = case.new + 0.5 * np.random.default_rng(9).standard_normal(len(case.new))
    by_token = {"grpo": 1 / sum(case.lengths), "dr_grpo": 1 / (6 * MAX_TOKENS)}
    by_length = np.repeat([1 / (6 * n) for n in case.lengths], case.lengths)

    def formula(new: Array) -> float:
        penalty = KL[estimator](new - reference) * by_token.get(name, by_length)
        return PAPERS[name](case, new) + 0.1 * float(penalty.sum())

    loss = job_loss(job(name=name, kl_coef=0.1, kl_estimator=estimator))
    value, gradient = mean_and_gradient(loss, batch(case, reference=reference))
    assert value == pytest.approx(formula(case.new), abs=1e-6)
    np.testing.assert_allclose(gradient, differences(formula, case.new), atol=1e-6)
    sums = loss(batch(case, reference=reference))[1]
    assert sums["reference_kl"] == pytest.approx(KL[estimator](case.new - reference).sum(), abs=1e-6)


def columns(*ratios: float, advantages: tuple[float, ...] = (1.0, 1.0, -1.0, -1.0)) -> TokenBatch:
    """Return two completions of two tokens each, which are now so many times as likely as when they were drawn."""
    return TokenBatch(
        torch.tensor(ratios, dtype=torch.float64).log() - 2.0,
        torch.full((4,), -2.0, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        (2, 2),
    )


def test_loss_reports_the_ratio_before_and_after_the_clip() -> None:
    _, sums = clipped_loss(0.2, 0.5)(columns(0.5, 3.0, 0.4, 1.0))
    assert sums["ratio"] == pytest.approx(4.9)
    assert sums["max_ratio"] == pytest.approx(3.0)
    assert sums["ratio_clipped"] == pytest.approx(0.8 + 1.5 + 0.8 + 1.0)
    assert sums["max_ratio_clipped"] == pytest.approx(1.5)
    assert (sums["clipped_low"], sums["clipped_high"]) == (1.0, 1.0), "0.5 with an advantage above 0 is not held"


def test_sequence_ratios_are_reported_per_token() -> None:
    loss = PolicyLoss(ratio="sequence", clip="ppo", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean")
    _, sums = loss(columns(1.0, 4.0, 0.25, 1.0))
    assert sums["ratio"] == pytest.approx(2 + 2 + 0.5 + 0.5)
    assert sums["ratio_clipped"] == pytest.approx(2 * 1.2 + 2 * 0.8)
    assert (sums["clipped_low"], sums["clipped_high"], sums["divisor"]) == (2.0, 2.0, 2.0)


def test_cispo_counts_every_weight_that_it_cuts() -> None:
    loss = PolicyLoss(clip="cispo", clip_low=0.5, clip_high=1.0)
    _, sums = loss(columns(0.25, 3.0, 0.25, 5.0))
    assert (sums["clipped_low"], sums["clipped_high"]) == (2.0, 2.0)
    assert sums["ratio_clipped"] == pytest.approx(0.5 + 2 + 0.5 + 2)


def test_unclipped_loss_reports_no_clip_metrics() -> None:
    sums = job_loss(job(name="rloo"))(columns(0.5, 3.0, 0.4, 1.0))[1]
    assert not {name for name in sums if "clipped" in name}


def test_the_mismatch_is_between_the_engine_and_the_weights_that_the_step_began_with() -> None:
    """KL(engine || trainer), by the estimator r - 1 - log r with r = trainer / engine."""
    aged = replace(columns(0.5, 3.0, 0.4, 1.0), proximal=torch.tensor([2.0, 1.0, 1.0, 0.5]).double().log() - 2.0)
    expected = (2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5))
    assert clipped_loss(0.2, 0.2)(aged)[1]["mismatch_kl"] == pytest.approx(expected)
    now = sum(r - 1 - math.log(r) for r in (0.5, 3.0, 0.4, 1.0))
    assert clipped_loss(0.2, 0.2)(columns(0.5, 3.0, 0.4, 1.0))[1]["mismatch_kl"] == pytest.approx(now)


def test_a_loss_of_ones_own_takes_the_place_of_ratio_and_clip() -> None:
    case = a_case(5)
    spec = job(loss="m:f", aggregation="sequence_mean", kl_coef=0.5)
    assert (spec.algorithm.ratio, spec.algorithm.clip, spec.algorithm.clip_low) == (None, None, None)

    def own(given: TokenBatch) -> torch.Tensor:
        return (given.logprobs - given.sampled).square() * given.advantages

    def formula(new: Array) -> float:
        terms = [(a * (pi - old) ** 2).mean() for pi, old, a in case.completions(new)]
        kl = [n * 0.5 * (math.exp(0.1) - 1 - 0.1) / n for n in case.lengths]
        return float(np.mean(terms) + np.mean(kl))

    given = batch(case, reference=case.new + 0.1)
    total, sums = job_loss(spec, own)(given)
    assert total.item() / sums["divisor"] == pytest.approx(formula(case.new), abs=1e-6)
    assert "ratio" in sums


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (lambda given: given.logprobs.sum(), r"a tensor of shape \[\]: return one number per token"),
        (lambda _given: 0.0, "returned float"),
        (lambda given: given.advantages, "without a gradient"),
    ],
)
def test_user_loss_with_an_invalid_result_is_refused(own: Any, text: str) -> None:
    with pytest.raises(Fatal, match=text):
        PolicyLoss(user_loss=own)(batch(a_case(0)))


def test_the_loss_that_the_guide_shows_is_one() -> None:
    guide = (Path(__file__).parents[3] / "docs/algorithms.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {}
    exec(block, module)
    case = a_case(6)

    def formula(new: Array) -> float:
        terms = [0.25 * (pi - old) ** 2 - a * pi for pi, old, a in case.completions(new)]
        return float(np.concatenate(terms).sum()) / sum(case.lengths)

    value, gradient = mean_and_gradient(job_loss(job(loss="m:f"), module["squared"]), batch(case))
    assert value == pytest.approx(formula(case.new), abs=1e-6)
    np.testing.assert_allclose(gradient, differences(formula, case.new), atol=1e-6)
