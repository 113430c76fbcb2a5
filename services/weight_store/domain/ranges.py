"""Which bytes of a chunk a request asks for."""

from __future__ import annotations

import re

_FROM = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")


def requested(header: str | None, n_bytes: int) -> range | None:
    """Return the positions that a `Range` header asks for (RFC 9110, section 14.2), None when there are none there.

    One range that has a first byte is understood; of anything else the whole is sent, as the RFC allows.

    Args:
        header: its value, None without one.
        n_bytes: the chunk's size.

    """
    found = _FROM.fullmatch(header or "")
    if found is None:
        return range(n_bytes)
    first, last = int(found[1]), int(found[2] or n_bytes - 1)
    if last < first and found[2]:
        return range(n_bytes)
    return range(first, min(last + 1, n_bytes)) if first < n_bytes else None
