"""A digest of the training prompts, so that a job never resumes with other data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any


def fingerprint(rows: Iterable[tuple[bytes, bytes, Mapping[str, Any]]]) -> str:
    """Return a digest of rows in their order, as hexadecimal digits.

    Args:
        rows: the prompt's token ids, the target completion, and the columns for the reward function, of each row.

    """
    whole = blake2b(digest_size=16)
    for tokens, completion, columns in rows:
        text = json.dumps(columns, sort_keys=True, default=repr).encode()
        for part in (tokens, completion, text):
            # Length-prefixed, so that different rows never give the same bytes.
            whole.update(len(part).to_bytes(8, "big"))
            whole.update(part)
    return whole.hexdigest()
