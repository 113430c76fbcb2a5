"""Ranks that write their snapshot onto a full disk stay in step, and write it once there is space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.errors import DiskFull
from rlboost.shared.job.training import OptimizerSpec
from tests.support import rank_policies
from tests.support.engine_steps import LOSS, RATE
from tests.support.policy_comparison import bits
from tests.support.small_disk import small_disk
from tests.support.training_rows import rows


@pytest.mark.parametrize(
    "layout", [{"backend": "torch", "data_parallel": 2}, {"tensor_parallel": 2}], ids=["fsdp", "tp"]
)
def test_snapshot_on_a_full_disk_can_be_taken_later(tmp_path: Path, layout: dict[str, Any]) -> None:
    model = rank_policies.write(tmp_path / "model", "qwen3")
    with (
        small_disk(tmp_path / "disk", 4 << 20) as disk,
        rank_policies.policy(OptimizerSpec(lr=RATE), folder=disk.path, **layout) as policy,
    ):
        policy.load_hf(model)
        policy.accumulate([rows()], LOSS)
        policy.step(RATE)
        disk.fill()
        with pytest.raises(DiskFull, match=r"cannot be written.*free space there"):
            policy.snapshot()
        disk.free()
        (tmp_path / "checkpoint").mkdir()
        policy.snapshot()(tmp_path / "checkpoint")
        before = bits(policy)
        policy.accumulate([rows(seed=1)], LOSS)
        policy.step(RATE)
        policy.load(tmp_path / "checkpoint")
        assert bits(policy) == before
