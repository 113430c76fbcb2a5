"""The envelope of a delta: a header that says what it is, and a checksum over all of it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from blake3 import blake3

from shared.errors import Bury

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""

MAX_VALUES = 1 << 30
"""Of one delta: lengths of sections are numbers of 32 bits. Chunks are far smaller."""

MAGIC = b"RBWD"
FORMAT_VERSION = 1
HEADER = struct.Struct("<4sBBBBII8s")
"""Magic, format version, kind, dtype, zero, values, changed values, checksum."""
CHECKED_HEADER = struct.Struct("<4sBBBBII")
"""The part of the header that the checksum covers."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value, by dtypes whose changes have steps. Everything else is bytes."""
DTYPE_CODES = {"bytes": 0, "bfloat16": 1, "float16": 2, "float32": 3}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class CorruptDelta(Bury):
    """A delta that is truncated, damaged or made up, or not one for this base. The target was not touched."""


class BaseNeeded(Bury, ValueError):
    """What is asked for cannot be done without the values that the delta is for: give them."""


class Kind(IntEnum):
    """How a delta says what changed; the numbers are the format's."""

    DENSE = 0
    """All new values."""
    OVERWRITE = 1
    """Positions and new values: may be applied twice, or over a damaged base."""
    RICE = 2
    """Positions as Rice-coded gaps, and steps."""
    BITMAP = 3
    """A bit for every value, and steps."""
    CLASS = 4
    """As rice, but positions are ranks within the classes of the base's exponent: the smallest, and the slowest."""


_KINDS = {kind.value: kind for kind in Kind}
STEP_KINDS = frozenset({Kind.RICE, Kind.BITMAP})
"""Kinds that say by how much a value changed: right for one base only, composed by addition, invertible. `CLASS` says
it too, but where the changes are can be told with the base alone."""


class Info(NamedTuple):
    """What a delta's header says."""

    kind: Kind
    dtype: str
    """`bytes` for every dtype without steps: its values are bytes."""
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
    """Return the delta of this header and payload."""
    checked = CHECKED_HEADER.pack(
        MAGIC, FORMAT_VERSION, info.kind, DTYPE_CODES[info.dtype], 0, info.n_values, info.n_changed
    )
    return b"".join([checked, _checksum(checked, payload), *payload])


def unseal(delta: Buffer) -> tuple[Info, memoryview]:
    """Return a delta's header and payload.

    Raises:
        CorruptDelta: these bytes are not a delta, or not as they were made.

    """
    view = memoryview(delta).cast("B")
    info = inspect(view)
    payload = view[HEADER.size :]
    if _checksum(view[: CHECKED_HEADER.size], [payload]) != view[CHECKED_HEADER.size : HEADER.size]:
        raise CorruptDelta("the delta's checksum does not match: get it again")
    return info, payload


def inspect(delta: Buffer) -> Info:
    """Return what the header says; the rest of the delta is not looked at.

    Raises:
        CorruptDelta: the header is not that of a delta this version can read.

    """
    view = memoryview(delta).cast("B")
    if len(view) < HEADER.size:
        raise CorruptDelta(f"a delta has at least {HEADER.size} bytes, this has {len(view)}")
    magic, version, kind, dtype, zero, n_values, n_changed, _ = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDelta("this is not a delta: it does not begin with RBWD")
    if version != FORMAT_VERSION:
        raise CorruptDelta(f"the delta has format version {version}, this reads {FORMAT_VERSION}")
    if kind not in _KINDS or dtype not in _DTYPES or zero:
        raise CorruptDelta(f"the delta's header is none: kind {kind}, dtype {dtype}, reserved byte {zero}")
    info = Info(_KINDS[kind], _DTYPES[dtype], n_values, n_changed)
    if n_values > MAX_VALUES or n_changed > n_values:
        raise CorruptDelta(f"the delta speaks of {n_changed} changes among {n_values} values")
    if info.kind in STEP_KINDS | {Kind.CLASS} and info.dtype not in WIDTHS:
        raise CorruptDelta(f"the delta has steps between {info.dtype}, which have none")
    return info


def _checksum(checked: Buffer, payload: list[Buffer]) -> bytes:
    state = blake3(checked)
    for piece in payload:
        state.update(piece)
    return state.digest(length=8)
