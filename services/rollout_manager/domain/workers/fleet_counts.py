"""How many workers a job has."""

from __future__ import annotations

from typing import NamedTuple


class FleetCounts(NamedTuple):
    """Numbers of workers allocated to a job and not draining."""

    reserved: int = 0
    reserved_awake: int = 0
    """Not suspended."""
    preemptible: int = 0
    preemptible_ready: int = 0
    """Can generate for a step in flight now."""
