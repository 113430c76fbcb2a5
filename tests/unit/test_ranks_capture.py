"""Who removes the files that ranks have captured for a checkpoint: whoever writes it, or the policy that is closed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from services.trainer.adapters.ranks import policy
from shared.training import OptimizerSpec, TrainerSpec


class Ranks:
    """Two, of which each has a file."""

    def __init__(self, *_: Any) -> None: ...

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        assert name == "save"
        for rank in range(2):
            (Path(arguments["directory"]) / f"rank-{rank}").write_text(str(rank))

    def close(self) -> None: ...


class Policy(policy.RanksPolicy):
    def _described(self, source: Path, config: Any) -> dict[str, Any]:
        raise NotImplementedError


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(policy, "Ranks", Ranks)
    (tmp_path / "kept").mkdir()
    spec = TrainerSpec(data_parallel=2)
    return Policy("fsdp", spec, OptimizerSpec(), temperature=1.0, device="cpu", folder=tmp_path / "aside")


def test_a_policy_that_is_closed_leaves_a_checkpoint_that_is_being_written(
    ranks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, move = ranks.snapshot(), shutil.move

    def closing(file: Path, directory: Path) -> None:
        ranks.close()
        move(file, directory)

    monkeypatch.setattr(shutil, "move", closing)
    write(tmp_path / "kept")
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"rank-0", "rank-1"}
    assert list((tmp_path / "aside").iterdir()) == []


def test_what_is_captured_and_not_written_goes_with_the_policy_or_the_next_capture(
    ranks: Policy, tmp_path: Path
) -> None:
    first = ranks.snapshot()
    second = ranks.snapshot()
    assert len(list((tmp_path / "aside").iterdir())) == 1
    with pytest.raises(OSError, match="was given up before it was written"):
        first(tmp_path / "kept")
    ranks.close()
    assert list((tmp_path / "aside").iterdir()) == []
    with pytest.raises(OSError, match="was given up before it was written"):
        second(tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
