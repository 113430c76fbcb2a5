"""The same samples give the same update, in whatever order groups come and however micro-batches are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlboost.services.trainer.domain.advantages import NEED_THE_STEP, Experience, gae_advantages, group_advantages
from rlboost.services.trainer.domain.loss.function import TokenBatch, add_sums
from rlboost.services.trainer.domain.loss.policy import job_loss, value_loss
from rlboost.services.trainer.domain.loss.preference import PairLogprobs, best_and_worst, pair_losses
from rlboost.services.trainer.domain.plan import Accumulate, UpdatePlanner, select
from rlboost.shared.job.algorithm import PRESETS
from rlboost.shared.job.spec import RlJob
from rlboost.shared.wire import F32
from tests.support.jobs import parse_rl

VOCABULARY, CONTEXTS, GROUP = 5, 3, 3


@dataclass(frozen=True)
class Sample:
    """A completion, and what was said of it before."""

    tokens: tuple[int, ...]
    before: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class TinyPolicy:
    """A table: the logits of a token depend on its place modulo `CONTEXTS`."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).standard_normal((CONTEXTS, VOCABULARY))
        self.table = torch.tensor(values, requires_grad=True)
        self.values = torch.tensor(values.mean(-1), requires_grad=True)
        self.reference = torch.tensor(values + 0.3 * np.random.default_rng(1).standard_normal(values.shape))

    def logprobs(self, table: Tensor, rows: list[Sample]) -> Tensor:
        tokens = torch.tensor([token for row in rows for token in row.tokens])
        return table.log_softmax(-1)[self._places(rows), tokens]

    def expected(self, rows: list[Sample]) -> Tensor:
        """Return what a critic says before each token, which is a table, too."""
        return self.values[self._places(rows)]

    @staticmethod
    def _places(rows: list[Sample]) -> Tensor:
        return torch.tensor([place % CONTEXTS for row in rows for place in range(row.n_tokens)])

    def batch(self, rows: list[Sample]) -> TokenBatch:
        before = torch.tensor([value for row in rows for value in row.before], dtype=torch.float64)
        advantages = torch.tensor([value for row in rows for value in row.advantages], dtype=torch.float64)
        return TokenBatch(
            self.logprobs(self.table, rows),
            before,
            advantages,
            tuple(row.n_tokens for row in rows),
            before + 0.1,
            self.logprobs(self.reference, rows).detach(),
        )


ScoredSequence = list[tuple[Sample, float]]


def rows_of(spec: RlJob, policy: TinyPolicy, groups: list[ScoredSequence]) -> list[list[Sample]]:
    """Return each group's rows, as far as they can be known before the update."""
    algorithm, rewards = spec.algorithm, [[reward for _, reward in group] for group in groups]
    if algorithm.critic is not None:
        values = [[policy.expected([sample]).detach().numpy() for sample, _ in group] for group in groups]
        step = [
            Experience(reward, column)
            for group, columns in zip(groups, values, strict=True)
            for (_, reward), column in zip(group, columns, strict=True)
        ]
        found = gae_advantages(step, 0.9, 0.8)
        known = iter(zip(found.advantages, found.returns, strict=True))
        return [
            [Sample(s.tokens, s.before, tuple(a), tuple(r)) for (s, _), (a, r) in zip(group, known, strict=False)]
            for group in groups
        ]
    if algorithm.preference is not None:
        places = [best_and_worst(one) for one in rewards]
        return [[group[i][0] for i in both or ()] for group, both in zip(groups, places, strict=True)]
    drop = algorithm.equal_groups == "drop"
    if algorithm.advantage in NEED_THE_STEP:
        together = group_advantages(algorithm.advantage, rewards, drop_equal=drop)
    else:
        together = [group_advantages(algorithm.advantage, [one], drop_equal=drop)[0] for one in rewards]
    return [
        [Sample(s.tokens, s.before, (a,) * s.n_tokens) for (s, _), a in zip(group, found or [], strict=False)]
        for group, found in zip(groups, together, strict=True)
    ]


def weighed(spec: RlJob, policy: TinyPolicy, work: Accumulate[Sample]) -> list[list[Sample]]:
    """Return micro-batches in which the completions of pairs have the weights that their loss comes down to."""
    if spec.algorithm.preference is None:
        return work.batches

    def column(table: Tensor, row: Sample) -> bytes:
        with torch.no_grad():
            return policy.logprobs(table, [row]).numpy().astype(F32).tobytes()

    columns = [[column(table, row) for row in work.rows] for table in (policy.table, policy.reference)]
    weights = pair_losses(PairLogprobs.of(*columns), spec.algorithm.preference).weights.ravel().tolist()
    rows = [Sample(row.tokens, row.before, (by,) * row.n_tokens) for row, by in zip(work.rows, weights, strict=True)]
    return select(rows, work.indices)


def update(spec: RlJob, groups: list[ScoredSequence], budget: int) -> tuple[Tensor, dict[str, float]]:
    """Train one update as a step does, group after group; return its gradient, a critic's too, and its numbers."""
    policy, loss = TinyPolicy(), job_loss(spec)
    planner: UpdatePlanner[Sample] = UpdatePlanner(len(groups), 1, budget)
    numbers: dict[str, float] = {}
    for rows in rows_of(spec, policy, groups):
        for work in planner.add(rows):
            if not isinstance(work, Accumulate):
                continue
            for batch in weighed(spec, policy, work):
                total, part = loss(policy.batch(batch))
                total.backward()
                add_sums(numbers, part)
                if spec.algorithm.critic is not None:
                    values = policy.expected(batch)
                    returns = torch.tensor([value for row in batch for value in row.returns])
                    value_loss(values, values.detach(), returns, 0.2).losses.sum().backward()
    gradients = [tensor.grad for tensor in (policy.table, policy.values)]
    flat = [torch.zeros(1) if gradient is None else gradient.flatten() / numbers["divisor"] for gradient in gradients]
    return torch.cat(flat), numbers


@st.composite
def steps(draw: st.DrawFn) -> list[list[tuple[Sample, float]]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def sample() -> tuple[Sample, float]:
        n = int(rng.integers(1, 9))
        tokens = tuple(int(token) for token in rng.integers(0, VOCABULARY, n))
        return Sample(tokens, tuple(-rng.uniform(0.5, 3.0, n))), float(rng.integers(0, 3))

    return [[sample() for _ in range(GROUP)] for _ in range(draw(st.integers(1, 6)))]


def job(name: str, max_staleness: int) -> RlJob:
    raw: dict[str, Any] = {"model": "m", "data": {"train": "t"}, "reward": {"function": "m:f"}, "steps": 1}
    algorithm = {"name": name, "group_size": GROUP, **({} if name == "dpo" else {"kl_coef": 0.1})}
    return parse_rl({**raw, "algorithm": algorithm, "elastic": {"max_staleness": max_staleness}})


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"distill"}))
@settings(max_examples=15, deadline=None)
@given(step=steps(), random=st.randoms(use_true_random=False), budget=st.integers(1, 60), stale=st.integers(0, 1))
def test_the_gradient_depends_on_neither_arrival_order_nor_micro_batches(
    name: str, step: list[list[tuple[Sample, float]]], random: Any, budget: int, stale: int
) -> None:
    spec = job(name, stale)
    whole, numbers = update(spec, step, 10_000)
    # Samples have an order of their own, by which the first of several that are as good is found.
    members = [group if name == "dpo" else random.sample(group, GROUP) for group in step]
    shuffled = random.sample(members, len(step))
    parts, others = update(spec, shuffled, budget)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-9)
    assert others == pytest.approx(numbers, rel=1e-9, abs=1e-9)


def test_the_same_order_and_cut_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    samples = [(Sample((1, 2, int(rng.integers(5))), (-1.0, -1.2, -0.7)), float(i % 3)) for i in range(9)]
    step = [samples[i : i + 3] for i in range(0, 9, 3)]
    one, other = (update(job("dr_grpo", 0), step, 7) for _ in range(2))
    assert one[0].equal(other[0])
    assert one[1] == other[1]
