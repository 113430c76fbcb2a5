"""A digest of the training prompts, so that a job never goes on with other ones under the same cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any


def fingerprint(rows: Iterable[tuple[bytes, bytes, Mapping[str, Any]]]) -> str:
    """Return a digest of rows in their order, as hexadecimal digits.

    Args:
        rows: of each the prompt's token ids, what is to be imitated, and the columns that its reward gets.

    """
    whole = blake2b(digest_size=16)
    for tokens, completion, columns in rows:
        text = json.dumps(columns, sort_keys=True, default=repr).encode()
        for part in (tokens, completion, text):
            # With its length before it: no two rows run into one another.
            whole.update(len(part).to_bytes(8, "big"))
            whole.update(part)
    return whole.hexdigest()
