"""Detects that a worker has missed commands, by comparing digests of what it was assigned (`messages.command_digest`).

Redis may lose the newest commands when it restarts from an older file, and a stream may be trimmed or deleted. Worker
and manager then differ for good, and a sample that only the manager believes to be assigned would never end.

Commands and frames in transit change the difference from heartbeat to heartbeat; a lost command leaves a constant one.
A worker is mismatched if the same non-zero difference was seen in `MIN_HEARTBEATS` heartbeats over `settle_s`, without
an equal digest in between. The manager then checks that the worker has read all of its commands, which excludes a slow
worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.shared.messages.command_digest import MODULUS
from rlboost.shared.streams.entries import START

MIN_HEARTBEATS = 3
"""How many heartbeats must show the same difference."""
_MAX_DIFFERENCES = 64


@dataclass(slots=True)
class CommandCheck:
    """The differences between one worker's digest and the manager's, since the two were equal last."""

    last_command: str = START
    """Entry id of the last command that the worker has applied, as of its last heartbeat."""
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Difference -> when it was seen first (manager's clock), and how often."""
    _mismatched_for_s: float = 0.0

    def observe(self, expected: int, reported: int, last_command: str, now: float) -> None:
        """Compare the digest in a heartbeat with the manager's at this moment."""
        self.last_command, self._mismatched_for_s = last_command, 0.0
        difference = (expected - reported) % MODULUS
        if not difference or len(self._seen) >= _MAX_DIFFERENCES:
            self._seen.clear()
        if difference:
            first_at, count = self._seen.get(difference, (now, 0))
            self._seen[difference] = first_at, count + 1
            if count + 1 >= MIN_HEARTBEATS:
                self._mismatched_for_s = now - first_at

    def is_mismatched(self, settle_s: float) -> bool:
        """Return True if the last heartbeat showed a difference that persists since `settle_s` or longer."""
        return self._mismatched_for_s >= settle_s

    def restart(self) -> None:
        """Forget all differences: they had another cause."""
        self._seen.clear()
        self._mismatched_for_s = 0.0
