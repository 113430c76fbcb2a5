"""The processes that a trainer has started for megatron-core."""

from __future__ import annotations

from pathlib import Path

MODULE = "services.trainer.adapters.ranks.rank"


def ranks_of(pid: int) -> list[int]:
    """Return the process ids of a process's ranks, rank 0 first."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(child) for file in children for child in file.read_text().split()}
    return sorted(child for child in found if MODULE in _command_of(child))


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
