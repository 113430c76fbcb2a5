"""Reads whole streams."""

from __future__ import annotations

from rlboost.services.rollout_manager.recovery import batches
from rlboost.shared.streams.bus import Bus, Entry


async def read_all(bus: Bus, stream: str) -> list[Entry]:
    """Return every entry of the stream, as the manager reads it when it recovers."""
    return [entry async for entries in batches(bus, stream) for entry in entries]
