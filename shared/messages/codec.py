"""Messages as msgpack maps: their base class, the table of their tags, and the types of their fields, with limits.

Services with the same protocol number work together, in any mix of releases. Messages of the same number differ only by
fields with defaults: fields are added, and removed if no release with the number reads them. Any other change raises
the number. A new message type on a stream that the other side reads is such a change, since an older reader would
dead-letter it, and later trim it. `streams.state_protocol` holds services to the leader's number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, StringConstraints, ValidationError

from rlboost.shared.errors import Undecodable
from rlboost.shared.ids import JOB_ID_PATTERN

# --- Types of the fields of messages, with the limits of what any service sends ---------------------------------------


def _whole(item_bytes: int) -> Callable[[bytes], bytes]:
    def check(column: bytes) -> bytes:
        if len(column) % item_bytes:
            raise ValueError(f"a column of {len(column)} bytes, which is not a multiple of {item_bytes}")
        return column

    return check


Column32 = Annotated[bytes, AfterValidator(_whole(4))]
"""An int32, uint32 or float32 column; those of `TokenFrame` are checked by the ledger, many frames at once."""
Column64 = Annotated[bytes, AfterValidator(_whole(8))]
"""A uint64 column."""
JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Attempt = Annotated[int, Field(ge=0, lt=1 << 31)]
PackedId = Annotated[int, Field(ge=0, lt=1 << 64)]
"""See `shared.ids.SampleId`."""
EntryId = Annotated[str, Field(pattern=r"^(\d{1,19}-\d{1,19})?$")]
"""The id of a stream entry, or empty."""
Version = Annotated[int, Field(ge=-1, lt=(1 << 32) - 1)]
"""A weight version; -1 before the first."""
Role = Literal["reserved", "preemptible"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_SECONDS = 1e11
"""Of a duration or a Unix time: any up to it is a date that can be shown, and sums of them are finite."""
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
UnixTime = Seconds
HourlyPrice = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
"""Dollars."""
EventKind = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,100}$")]
Span = Annotated[tuple[str, Version, Count], Strict(False)]
"""(worker, weight version, number of tokens) of consecutive tokens. msgpack decodes tuples as lists."""


# --- The base class of messages, and the table of their tags ----------------------------------------------------------


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: ClassVar[str] = ""


_REGISTRY: dict[str, type[Message]] = {}

M = TypeVar("M", bound=type[Message])


def message(cls: M) -> M:
    """Register a message class under its tag (its own name, unless it sets one)."""
    cls.tag = cls.tag or cls.__name__
    if cls.tag in _REGISTRY:
        raise ValueError(f"two messages with the tag {cls.tag!r}")
    _REGISTRY[cls.tag] = cls
    return cls


def registered() -> dict[str, type[Message]]:
    """Return a copy of the tag -> class table, for tests and documentation."""
    return dict(_REGISTRY)


def class_of(tag: str) -> type[Message]:
    """Return the class of a tag.

    Raises:
        KeyError: the tag is unknown.

    """
    return _REGISTRY[tag]


_SMALL_BYTES = 1 << 20
MAX_ITEMS = 1 << 20
"""Of all lists and maps of a message of more than `_SMALL_BYTES`: one byte may become an object of 64."""
MAX_REASON_CHARS = 1000
"""Of why bytes are no message: it is logged, and may quote them."""
PROTOCOL = 4
OLDEST_STATE = 3
"""The lowest number whose streams and keys this release continues; a release that cannot read them raises it."""
UNNUMBERED_WORKER = 3
"""The number of a `WorkerJoined` without one. It never changes."""
UNNUMBERED = 1
"""The number of a client that sends none. It never changes."""
PROTOCOL_HEADER = "X-RLBoost-Protocol"
"""The request header with the number of a joining worker."""


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
        body = unpacked(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # The error, and its repr, have all of the bytes.
        raise Undecodable(f"not a message: {type(error).__name__}: {error}"[:MAX_REASON_CHARS]) from None
    if not isinstance(body, dict):
        raise Undecodable(f"not a message: it is a {type(body).__name__}")
    return body


def unpacked(data: bytes) -> Any:
    """Return what is packed; what is large has few items besides bytes, which take no more memory unpacked.

    Raises:
        ValueError, msgpack.UnpackException: it is not msgpack, or has too many items.

    """
    if len(data) > _SMALL_BYTES:
        _check_items(data)
    return msgpack.unpackb(data, raw=False)


def _check_items(data: bytes) -> None:
    """Raise ValueError if lists and maps have more than `MAX_ITEMS` items in all, nested ones too, or say so.

    msgpack's own limits and hooks are for one list: a list in a list in a list has as many items at each level.
    """
    at = n_items = 0
    left = 1
    while left and at < len(data):
        n_length_bytes, length, n_inner = _HEADS[data[at]]
        at += 1 + n_length_bytes
        length += int.from_bytes(data[at - n_length_bytes : at], "big")
        if not n_inner:
            at += length
        n_items += length * n_inner
        left += length * n_inner - 1
        if n_items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items in {len(data)} bytes: send columns, or it in parts")


def _heads() -> tuple[tuple[int, int, int], ...]:
    heads = [(0, 0, 0)] * 256  # small integers, nil and booleans
    for n in range(16):
        heads[0x80 + n], heads[0x90 + n] = (0, n, 2), (0, n, 1)  # short maps and lists
    for n in range(32):
        heads[0xA0 + n] = (0, n, 0)  # short texts
    for i, n in enumerate((1, 2, 4)):
        heads[0xC4 + i] = heads[0xD9 + i] = (n, 0, 0)  # bytes and texts
        heads[0xC7 + i] = (n, 1, 0)  # extensions, which have a byte for their type
    for i, n in enumerate((1, 2, 4, 8, 16)):
        heads[0xD4 + i] = (0, 1 + n, 0)  # extensions of a fixed length
    for i, n in enumerate((1, 2, 4, 8)):
        heads[0xCC + i] = heads[0xD0 + i] = (0, n, 0)  # integers
    heads[0xCA], heads[0xCB] = (0, 4, 0), (0, 8, 0)  # floats
    for i, n in enumerate((2, 4)):
        heads[0xDC + i], heads[0xDE + i] = (n, 0, 1), (n, 0, 2)  # lists and maps
    return tuple(heads)


_HEADS = _heads()
"""First byte of a packed value -> bytes of the length that follows it, what is added to this length, and how many
values each unit of it has: 0 for bytes, 1 in a list, 2 in a map."""


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
        reason = f"{error.title}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, TypeError, KeyError) as error:
        reason = f"not a message: {error!r}"
    raise Undecodable(reason[:MAX_REASON_CHARS])
