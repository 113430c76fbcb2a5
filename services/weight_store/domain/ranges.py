"""Parse the `Range` header of a request for a chunk."""

from __future__ import annotations

import re

_FROM = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")


def parse_range(header: str | None, n_bytes: int) -> range | None:
    """Return the requested positions (RFC 9110, section 14.2), None if they start after the end of the chunk.

    A single range with a first byte is supported; for anything else the whole chunk is sent, as the RFC allows.

    Args:
        header: value of the header; None if absent.
        n_bytes: the chunk's size.

    """
    found = _FROM.fullmatch(header or "")
    if found is None:
        return range(n_bytes)
    first, last = int(found[1]), int(found[2] or n_bytes - 1)
    if last < first and found[2]:
        return range(n_bytes)
    return range(first, min(last + 1, n_bytes)) if first < n_bytes else None
