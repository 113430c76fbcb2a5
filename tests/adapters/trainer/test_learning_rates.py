"""The schedule of the learning rate, against that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from rlboost.services.trainer.domain.plan import learning_rate
from rlboost.shared.job.training import OptimizerSpec


@pytest.mark.parametrize(
    ("name", "chosen", "others"),
    [
        ("linear", {"decay": 1.0}, {}),
        ("constant_with_warmup", {"decay": 0.0}, {}),
        ("cosine", {"decay": 1.0, "schedule": "cosine"}, {}),
        ("cosine_with_min_lr", {"decay": 0.9, "schedule": "cosine"}, {"min_lr_rate": 0.1}),
    ],
)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (1, 7), (2, 4), (5, 10), (10, 10), (12, 10), (0, 1), (30, 600)])
def test_learning_rate_is_that_of_transformers(
    name: str, chosen: dict[str, Any], others: dict[str, Any], warmup: int, steps: int
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=others
    )
    spec = OptimizerSpec(lr=3e-4, warmup_steps=warmup, **chosen)
    for step in range(steps):
        assert learning_rate(spec, step, steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        scheduler.step()


def test_cosine_schedule_without_a_fall_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule: cosine is the form of the fall by decay, which is 0.*set decay"):
        OptimizerSpec(schedule="cosine")


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_learning_rate_reaches_lr_after_the_warm_up(decay: float) -> None:
    spec = OptimizerSpec(lr=1e-3, warmup_steps=5, decay=decay)
    rates = [learning_rate(spec, step, 10) for step in range(10)]
    assert max(rates) == rates[5] == 1e-3
    assert rates[-1] == pytest.approx(1e-3 * (1 - decay * 4 / 5))
