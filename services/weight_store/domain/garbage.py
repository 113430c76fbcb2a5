"""Select the chunks that garbage collection may remove.

A chunk is *used* when it is uploaded, when a publisher asks whether the store has it, and when a commit checks for it.
An upload in progress has used its chunks within the grace period. A chunk of a retired version that was not used since
that version's commit is not part of an upload, so it is removed without waiting.
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
    """Return digest -> time of last use of the chunks that may be removed.

    Args:
        last_used: digest -> time of last use, of every chunk in the store.
        referenced: digests in visible manifests and staged parts.
        retired: digest -> time of commit, of the chunks of retired versions.
        now: the current time.
        grace_s: how long an unreferenced chunk is retained.

    """
    return {
        digest: used_at
        for digest, used_at in last_used.items()
        if digest not in referenced and (used_at <= retired.get(digest, float("-inf")) or used_at < now - grace_s)
    }
