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

from services.trainer.domain.advantages import NEED_THE_STEP, estimate
from services.trainer.domain.batching import Accumulate, UpdatePlanner
from services.trainer.domain.loss import job_loss
from services.trainer.domain.sums import add
from services.trainer.domain.tokens import TokenBatch
from shared.algorithm import PRESETS
from shared.jobspec import JobSpec, parse

VOCABULARY, CONTEXTS, GROUP = 5, 3, 3


@dataclass(frozen=True)
class Sample:
    """A completion, and what was said of it before."""

    tokens: tuple[int, ...]
    before: tuple[float, ...]
    advantage: float

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class TinyPolicy:
    """A table: the logits of a token depend on its place modulo `CONTEXTS`."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).standard_normal((CONTEXTS, VOCABULARY))
        self.table = torch.tensor(values, requires_grad=True)
        self.reference = torch.tensor(values + 0.3 * np.random.default_rng(1).standard_normal(values.shape))

    def logprobs(self, table: Tensor, rows: list[Sample]) -> Tensor:
        places = torch.tensor([place % CONTEXTS for row in rows for place in range(row.n_tokens)])
        tokens = torch.tensor([token for row in rows for token in row.tokens])
        return table.log_softmax(-1)[places, tokens]

    def batch(self, rows: list[Sample]) -> TokenBatch:
        before = torch.tensor([value for row in rows for value in row.before], dtype=torch.float64)
        advantages = torch.tensor([row.advantage for row in rows for _ in row.tokens], dtype=torch.float64)
        return TokenBatch(
            self.logprobs(self.table, rows),
            before,
            advantages,
            tuple(row.n_tokens for row in rows),
            before + 0.1,
            self.logprobs(self.reference, rows).detach(),
        )


def update(spec: JobSpec, groups: list[list[tuple[Sample, float]]], budget: int) -> tuple[Tensor, dict[str, float]]:
    """Train one update as a step does, group after group; return its gradient and its numbers."""
    policy, loss = TinyPolicy(), job_loss(spec)
    planner: UpdatePlanner[Sample] = UpdatePlanner(len(groups), 1, budget)
    rewards = [[reward for _, reward in group] for group in groups]
    kind, drop = spec.algorithm.advantage, spec.algorithm.equal_groups == "drop"
    together = estimate(kind, rewards, drop_equal=drop) if kind in NEED_THE_STEP else None
    numbers: dict[str, float] = {}
    for i, group in enumerate(groups):
        found = together[i] if together else estimate(kind, [rewards[i]], drop_equal=drop)[0]
        rows = [Sample(s.tokens, s.before, a) for (s, _), a in zip(group, found or [], strict=False)]
        for work in planner.add(rows):
            for batch in work.batches if isinstance(work, Accumulate) else []:
                total, part = loss(policy.batch(batch))
                total.backward()
                add(numbers, part)
    gradient = policy.table.grad
    return (torch.zeros_like(policy.table) if gradient is None else gradient / numbers["divisor"]), numbers


@st.composite
def steps(draw: st.DrawFn) -> list[list[tuple[Sample, float]]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def sample() -> tuple[Sample, float]:
        n = int(rng.integers(1, 9))
        tokens = tuple(int(token) for token in rng.integers(0, VOCABULARY, n))
        return Sample(tokens, tuple(-rng.uniform(0.5, 3.0, n)), 0.0), float(rng.integers(0, 3))

    return [[sample() for _ in range(GROUP)] for _ in range(draw(st.integers(1, 6)))]


def job(name: str, max_staleness: int) -> JobSpec:
    raw: dict[str, Any] = {"model": "m", "data": {"train": "t"}, "reward": {"function": "m:f"}, "steps": 1}
    algorithm = {"name": name, "group_size": GROUP, "kl_coef": 0.1}
    return parse({**raw, "algorithm": algorithm, "elastic": {"max_staleness": max_staleness}})


@pytest.mark.parametrize("name", sorted(PRESETS))
@settings(max_examples=15, deadline=None)
@given(step=steps(), random=st.randoms(use_true_random=False), budget=st.integers(1, 60), stale=st.integers(0, 1))
def test_the_gradient_depends_on_neither_arrival_order_nor_micro_batches(
    name: str, step: list[list[tuple[Sample, float]]], random: Any, budget: int, stale: int
) -> None:
    spec = job(name, stale)
    whole, numbers = update(spec, step, 10_000)
    shuffled = random.sample([random.sample(group, GROUP) for group in step], len(step))
    parts, others = update(spec, shuffled, budget)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-9)
    assert others == pytest.approx(numbers, rel=1e-9, abs=1e-9)


def test_the_same_order_and_cut_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    samples = [(Sample((1, 2, int(rng.integers(5))), (-1.0, -1.2, -0.7), 0.0), float(i % 3)) for i in range(9)]
    step = [samples[i : i + 3] for i in range(0, 9, 3)]
    one, other = (update(job("dr_grpo", 0), step, 7) for _ in range(2))
    assert one[0].equal(other[0])
    assert one[1] == other[1]
