from __future__ import annotations

from typing import Any

import pytest

from rlboost.jobs.check import SMALL_MODEL, lr_advice
from rlboost.shared.job import spec as job_spec

LARGE = 600_000_000


def advice(lr: float, n_parameters: int | None = LARGE, **changes: Any) -> str:
    job: dict[str, Any] = {"model": "m", "data": {"train": "t"}, "optimizer": {"lr": lr}, "steps": 1}
    if "kind" not in changes:
        job["reward"] = {"function": "a:b"}
    return lr_advice(job_spec.parse({**job, **changes}), n_parameters)


@pytest.mark.parametrize(
    ("lr", "changes"),
    [
        (5e-4, {}),
        (5e-4, {"n_parameters": None}),
        (5e-3, {"elastic": {"weights": "lora"}}),
        (5e-3, {"kind": "sft"}),
        (5e-4, {"kind": "dpo"}),
    ],
)
def test_lr_advice_high_rate_warns_and_names_a_usual_one(lr: float, changes: dict[str, Any]) -> None:
    given = advice(lr, **changes)
    assert f"optimizer.lr: {lr:g}" in given
    assert "start with 1e-" in given


@pytest.mark.parametrize(
    ("lr", "changes"),
    [
        (1e-6, {}),
        (1e-5, {}),
        (5e-4, {"n_parameters": SMALL_MODEL - 1}),
        (2e-4, {"elastic": {"weights": "lora"}}),
        (1e-4, {"kind": "sft"}),
        (1e-5, {"kind": "dpo"}),
        (2e-2, {"kind": "sft", "optimizer": {"name": "muon", "lr": 2e-2}}),
    ],
)
def test_lr_advice_usual_rate_is_silent(lr: float, changes: dict[str, Any]) -> None:
    assert advice(lr, **changes) == ""
