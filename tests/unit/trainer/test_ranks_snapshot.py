"""The files of a ranks' snapshot remain until it is dropped, replaced or the policy is closed."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.torch import policy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import DiskFull
from rlboost.shared.job.training import TrainerSpec


class FakeRankCalls:
    """Two ranks that write one file each."""

    def __init__(self, *_: Any) -> None: ...

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        assert name == "save"
        for rank in range(2):
            (Path(arguments["directory"]) / f"rank-{rank}").write_text(str(rank))

    def close(self) -> None: ...


class Policy(policy.RanksPolicy):
    kind = "fsdp"

    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        raise NotImplementedError


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(policy, "RankCalls", FakeRankCalls)
    (tmp_path / "checkpoint").mkdir()
    layout = Layout.of(TrainerSpec(data_parallel=2))
    return Policy(PolicySettings(), layout, device="cpu", folder=tmp_path / "scratch")


def test_close_waits_for_a_snapshot_that_is_being_written(
    ranks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, link = ranks.snapshot(), os.link
    closing = threading.Thread(target=ranks.close)

    def slow(file: Path, target: Path) -> None:
        if not closing.is_alive():
            closing.start()
            closing.join(0.05)
        link(file, target)

    monkeypatch.setattr(os, "link", slow)
    write(tmp_path / "checkpoint")
    closing.join()
    assert {file.name for file in (tmp_path / "checkpoint").iterdir()} == {"rank-0", "rank-1"}
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("is_linked", [True, False])
def test_snapshot_can_be_written_again_until_it_is_dropped(
    ranks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not is_linked:
        monkeypatch.setattr(os, "link", refused)
    write = ranks.snapshot()
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder)
        assert [(tmp_path / folder / f"rank-{rank}").read_text() for rank in range(2)] == ["0", "1"]
    ranks.drop_snapshot()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (tmp_path / "second" / "rank-1").read_text() == "1"


@pytest.mark.parametrize("fails", ["the folder", "a rank"])
def test_snapshot_on_a_full_disk_leaves_nothing_there(
    ranks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_rank(calls: FakeRankCalls, name: str, arguments: dict[str, Any]) -> None:
        (Path(arguments["directory"]) / "rank-0").write_text("a part")
        raise DiskFull(name)

    with monkeypatch.context() as patch:
        if fails == "a rank":
            patch.setattr(FakeRankCalls, "call", full_rank)
        else:
            patch.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(DiskFull):
            ranks.snapshot()
    assert list((tmp_path / "scratch").iterdir()) == []
    ranks.snapshot()(tmp_path / "checkpoint")
    ranks.close()


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
