"""The envelope of a delta: a header that describes it, and a checksum over all of it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from blake3 import blake3

from rlboost.shared.errors import Unprocessable

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""

MAX_VALUES = 1 << 30
"""Values in one delta: section lengths are 32-bit numbers. Chunks are far smaller."""

MAGIC = b"RBWD"
FORMAT_VERSION = 2
HEADER = struct.Struct("<4sBBBBII8s")
"""Magic, format version, kind, dtype, zero, values, changed values, checksum."""
CHECKED_HEADER = struct.Struct("<4sBBBBII")
"""The part of the header that the checksum covers."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per value of the dtypes that have steps. Values of every other dtype are opaque bytes."""
DTYPE_CODES = {"bytes": 0, "bfloat16": 1, "float16": 2, "float32": 3}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class CorruptDelta(Unprocessable):
    """A delta that is truncated, damaged or forged, or that is for another base. The target is unchanged."""


class Kind(IntEnum):
    """How a delta encodes its changes; the numbers are those of the format."""

    DENSE = 0
    """All new values."""
    RICE = 1
    """Positions as Rice-coded gaps, and steps."""
    BITMAP = 2
    """One bit for every value, and steps."""


_KINDS = {kind.value: kind for kind in Kind}


class Info(NamedTuple):
    """The content of a delta's header."""

    kind: Kind
    dtype: str
    """`bytes` for every dtype without steps."""
    n_values: int
    n_changed: int
    """`n_values` for a dense delta."""

    @property
    def width(self) -> int:
        """Return the bytes of one value."""
        return WIDTHS.get(self.dtype, 1)

    @property
    def n_bytes(self) -> int:
        """Return the length of the base and of the result."""
        return self.n_values * self.width


def seal(info: Info, payload: list[Buffer]) -> bytes:
    """Return the delta with this header and payload."""
    checked = CHECKED_HEADER.pack(
        MAGIC, FORMAT_VERSION, info.kind, DTYPE_CODES[info.dtype], 0, info.n_values, info.n_changed
    )
    return b"".join([checked, _checksum(checked, payload), *payload])


def unseal(delta: Buffer) -> tuple[Info, memoryview]:
    """Return a delta's header and payload.

    Raises:
        CorruptDelta: the bytes are not a delta, or the checksum does not match.

    """
    view = memoryview(delta).cast("B")
    info = inspect(view)
    payload = view[HEADER.size :]
    if _checksum(view[: CHECKED_HEADER.size], [payload]) != view[CHECKED_HEADER.size : HEADER.size]:
        raise CorruptDelta("the delta's checksum does not match: fetch it again")
    return info, payload


def inspect(delta: Buffer) -> Info:
    """Return the content of the header; the payload is not read.

    Raises:
        CorruptDelta: the header is not that of a delta that this version can read.

    """
    view = memoryview(delta).cast("B")
    if len(view) < HEADER.size:
        raise CorruptDelta(f"a delta has at least {HEADER.size} bytes, this has {len(view)}")
    magic, version, kind, dtype, zero, n_values, n_changed, _ = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDelta("this is not a delta: it does not start with RBWD")
    if version != FORMAT_VERSION:
        raise CorruptDelta(f"the delta has format version {version}, this process reads {FORMAT_VERSION}")
    if kind not in _KINDS or dtype not in _DTYPES or zero:
        raise CorruptDelta(f"the delta's header is invalid: kind {kind}, dtype {dtype}, reserved byte {zero}")
    info = Info(_KINDS[kind], _DTYPES[dtype], n_values, n_changed)
    if n_values > MAX_VALUES or n_changed > n_values:
        raise CorruptDelta(f"the delta declares {n_changed} changes among {n_values} values")
    if info.kind != Kind.DENSE and info.dtype not in WIDTHS:
        raise CorruptDelta(f"the delta has steps, but its dtype {info.dtype} has none")
    return info


def _checksum(checked: Buffer, payload: list[Buffer]) -> bytes:
    state = blake3(checked)
    for block in payload:
        state.update(block)
    return state.digest(length=8)
