"""Which chunks may go.

A chunk is *used* when it is uploaded, when a publisher asks whether the store has it, and when a commit checks for it.
An upload in progress has used its chunks within the grace. A chunk of a retired version that nobody has used since
that version's commit is not part of any upload, so it need not wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet


def garbage(
    last_used: Mapping[str, float],
    referenced: AbstractSet[str],
    retired: Mapping[str, float],
    *,
    now: float,
    grace_s: float,
) -> dict[str, float]:
    """Return the digests that may be removed, each with the last use that this was decided on.

    Args:
        last_used: digest -> when it was used last, of every chunk held.
        referenced: digests in a visible manifest or in a part that waits for its commit.
        retired: digest -> when it was committed, of the chunks of retired versions.
        now: the time.
        grace_s: how long an unreferenced chunk is kept.

    """
    return {
        digest: used_at
        for digest, used_at in last_used.items()
        if digest not in referenced and (used_at <= retired.get(digest, float("-inf")) or used_at < now - grace_s)
    }
