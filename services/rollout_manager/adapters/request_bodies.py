"""Bodies of requests as values, and values as bytes that another process reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from rlboost.services.rollout_manager.ports import InvalidJson
from rlboost.shared import validation
from rlboost.shared.wire import I32, pack

SMALL_BODY_BYTES = 64 << 10
"""A body up to this size is parsed in the manager's process, which takes 3 ms at most."""
MAX_VALUES = 1 << 17
"""Values of one body, with those in lists and objects; a prompt of token ids is one. The manager's loop sees each."""
NOT_PACKED = "has a number of more than 64 bits, or too many levels"


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text; see `TextProcessor.parse`."""
    try:
        value = validation.parse_json(body)
    except json.JSONDecodeError as error:
        raise InvalidJson(f"JSON decode error: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the text is not UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidJson("the JSON text has too many levels") from error
    except ValueError as error:
        raise InvalidJson(f"the JSON text: {error}") from error
    if isinstance(value, dict) and isinstance(prompt := value.get("prompt"), list):
        packed = _column(prompt)
        value["prompt"] = [_column(one) for one in prompt] if packed is prompt else packed
    if len(body) > SMALL_BODY_BYTES:
        _check_sendable(value)
    return value


def _column(value: Any) -> Any:
    """Return a list of token ids as a column, and any other value as it is."""
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return value
    try:
        tokens = np.array(value, dtype=np.int64)
    except OverflowError:
        return value
    return pack(tokens, I32) if tokens.min() >= 0 and tokens.max() < 1 << 31 else value


def _check_sendable(value: Any) -> None:
    n_values, level = 0, [value]
    while level:
        n_values += len(level)
        if n_values > MAX_VALUES:
            raise InvalidJson(f"the body has more than {MAX_VALUES} values: send fewer, and token ids as `prompt`")
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    try:
        packed_value({"value": value})
    except (OverflowError, ValueError) as error:
        raise InvalidJson(f"the body {NOT_PACKED}") from error


def packed_value(value: Mapping[str, Any]) -> bytes:
    """Return a value as bytes.

    Raises:
        OverflowError: it has a number of more than 64 bits.
        ValueError: it has too many levels.

    """
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")  # a text may have half of a character
    return packed


def unpacked_value(packed: bytes) -> Any:
    """Invert `packed_value`."""
    return msgpack.unpackb(packed, unicode_errors="surrogatepass")


def unpacker_of(n_bytes: int) -> msgpack.Unpacker:
    """Return what takes a packed value of this size in parts (`feed`), and returns it (`unpack`)."""
    return msgpack.Unpacker(read_size=n_bytes, max_buffer_size=n_bytes, unicode_errors="surrogatepass")
