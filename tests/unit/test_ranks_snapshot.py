"""The files of a ranks' snapshot are removed by its writer, or when the policy is closed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.ranks import policy
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec


class FakeRankCalls:
    """Two ranks that write one file each."""

    def __init__(self, *_: Any) -> None: ...

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        assert name == "save"
        for rank in range(2):
            (Path(arguments["directory"]) / f"rank-{rank}").write_text(str(rank))

    def close(self) -> None: ...


class Policy(policy.RanksPolicy):
    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        raise NotImplementedError


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(policy, "RankCalls", FakeRankCalls)
    (tmp_path / "checkpoint").mkdir()
    spec = TrainerSpec(data_parallel=2)
    return Policy("fsdp", spec, OptimizerSpec(), temperature=1.0, device="cpu", folder=tmp_path / "scratch")


def test_close_spares_a_snapshot_that_is_being_written(
    ranks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, move = ranks.snapshot(), shutil.move

    def closing(file: Path, directory: Path) -> None:
        ranks.close()
        move(file, directory)

    monkeypatch.setattr(shutil, "move", closing)
    write(tmp_path / "checkpoint")
    assert {file.name for file in (tmp_path / "checkpoint").iterdir()} == {"rank-0", "rank-1"}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_unwritten_snapshot_is_dropped_by_the_next_one_or_by_close(ranks: Policy, tmp_path: Path) -> None:
    first = ranks.snapshot()
    second = ranks.snapshot()
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    with pytest.raises(OSError, match="dropped before it was written"):
        first(tmp_path / "checkpoint")
    ranks.close()
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(OSError, match="dropped before it was written"):
        second(tmp_path / "checkpoint")
    assert list((tmp_path / "checkpoint").iterdir()) == []
