"""Finds the rank processes of a trainer."""

from __future__ import annotations

from pathlib import Path

MODULE = "rlboost.services.trainer.adapters.torch.rank"


def ranks_of(pid: int) -> list[int]:
    """Return the process ids of a process's ranks, rank 0 first."""
    return [child for child in children_of(pid) if _is_rank(Path(f"/proc/{child}"))]


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for file in children for child in file.read_text().split()})


def _is_rank(process: Path) -> bool:
    try:
        return MODULE in (process / "cmdline").read_text(errors="replace")
    except OSError:
        return False
