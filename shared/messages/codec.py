"""Encodes messages as msgpack maps with the message's tag."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import ValidationError

from rlboost.shared.errors import Undecodable
from rlboost.shared.messages import Message, class_of


def encode(msg: Message) -> bytes:
    """Return the message's bytes."""
    body = {"t": msg.tag, **msg.model_dump()}
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the message's fields, not validated, with its tag as `t`.

    Raises:
        Undecodable: the bytes are not a msgpack map.

    """
    try:
        body = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Undecodable(f"not a message: {error!r}") from error
    if not isinstance(body, dict):
        raise Undecodable(f"not a message: it is a {type(body).__name__}")
    return body


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        Undecodable: the bytes are not msgpack, the tag is unknown, or a field is missing or has the wrong type.

    """
    body = fields_of(data)
    try:
        return class_of(body.pop("t")).model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise Undecodable(f"{error.title}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise Undecodable(f"not a message: {error!r}") from error
