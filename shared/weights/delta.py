"""Lossless deltas between two versions of a chunk of weights: encode, apply, compose.

A delta has two streams of integers, which `pcodec` compresses: the gaps between the positions of changed values, and
the differences of their bit patterns. Differences at one position add up modulo 2^bits, so deltas compose without a
base. The format is in `docs/weights-format.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec
from pcodec.wrapped import ChunkDecompressor, FileCompressor, FileDecompressor

from rlboost.shared.errors import Unprocessable
from rlboost.shared.weights.manifest import CHUNK_BYTES, ITEM_BYTES

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes, from any address on."""
Values = NDArray[Any]
"""Bit patterns of weights, or their differences: unsigned, as wide as the dtype."""

MAGIC = b"RBWD"
FORMAT_VERSION = 3
HEADER = struct.Struct("<4sBBxxII8s")
"""Magic, format version, bytes of a value, values, changed values, checksum."""
CHECKED_HEADER = struct.Struct("<4sBBxxII")
"""The part of the header that the checksum covers."""
LENGTH = struct.Struct("<I")
PAGE = 1 << 15
"""Changes that are decoded at a time. It bounds the decoder's memory, whatever a delta declares."""
CLASSIC = b"\0"
"""First byte of pcodec's metadata: values as they are. Its other modes may declare windows of 64 MiB and more."""

_VALUES = {width: np.dtype(f"<u{width}") for width in sorted(set(ITEM_BYTES.values()))}
_GAPS = np.dtype("<u4")


class CorruptDelta(Unprocessable):
    """A delta that is damaged or forged, of another format, or for another base: pull the chunk whole."""


class _Info(NamedTuple):
    """The content of a delta's header."""

    width: int
    """Bytes of a value."""
    n_values: int
    n_changed: int


def encode_delta(base: Buffer, new: Buffer, dtype: str) -> bytes:
    """Return the delta that turns `base` into `new`, bit for bit.

    Args:
        base: the values of one chunk, little-endian.
        new: as many values.
        dtype: torch's name of their dtype, a key of `ITEM_BYTES`.

    Raises:
        ValueError: the lengths differ, are not a multiple of the dtype's width, or exceed a chunk.

    """
    sizes = [len(memoryview(data).cast("B")) for data in (base, new)]
    width = ITEM_BYTES[dtype]
    if sizes[0] != sizes[1] or sizes[0] % width or sizes[0] > CHUNK_BYTES:
        raise ValueError(
            f"a base of {sizes[0]} and new values of {sizes[1]} bytes: a delta needs as many {dtype}, in one chunk"
        )
    return _encoded(_values(base, width), _values(new, width))


def apply_delta(target: bytearray | memoryview, delta: Buffer) -> None:
    """Apply the delta to its base in `target`, in place.

    Memory: about 1 MiB at most, besides delta and target.

    Raises:
        CorruptDelta: the delta is damaged, forged, of another format or for a base of another length. Discard the
            target: a forged delta may have changed it.

    """
    info, payload = _unsealed(delta)
    n_bytes = len(memoryview(target).cast("B"))
    if n_bytes != info.n_values * info.width:
        raise CorruptDelta(f"the delta is for a base of {info.n_values * info.width} bytes, this has {n_bytes}")
    values = _values(target, info.width)
    for positions, differences in _pages(info, payload):
        values[positions] += differences


def compose_deltas(first: Buffer, second: Buffer) -> bytes:
    """Return one delta with the effect of `first` followed by `second`.

    Raises:
        CorruptDelta: one is damaged, or they are for bases of different lengths or widths.

    """
    (one, _), (two, _) = _unsealed(first), _unsealed(second)
    if (one.width, one.n_values) != (two.width, two.n_values):
        raise CorruptDelta(
            f"a delta of {two.n_values} values of {two.width} bytes cannot follow one of {one.n_values} of {one.width}"
        )
    differences = bytearray(one.n_values * one.width)
    apply_delta(differences, first)
    apply_delta(differences, second)
    return _encoded(np.zeros(one.n_values, _VALUES[one.width]), _values(differences, one.width))


def _values(data: Buffer, width: int) -> Values:
    return np.frombuffer(data, dtype=_VALUES[width])


def _encoded(base: Values, new: Values) -> bytes:
    positions = np.flatnonzero(base != new)
    gaps = (np.diff(positions, prepend=-1) - 1).astype(_GAPS)
    differences = new[positions] - base[positions]
    info = _Info(base.itemsize, len(base), len(positions))
    checked = CHECKED_HEADER.pack(MAGIC, FORMAT_VERSION, *info)
    blobs = [LENGTH.pack(len(blob)) + blob for blob in _compressed([gaps, _zigzag(differences)])]
    return b"".join([checked, _checksum(checked, *blobs), *blobs])


def _compressed(streams: Sequence[NDArray[Any]]) -> Iterator[bytes]:
    """Yield the metadata of each stream, then its pages, alternating between the streams."""
    n = len(streams[0])
    if not n:
        return
    pages = [min(PAGE, n - start) for start in range(0, n, PAGE)]
    config = ChunkConfig(
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes(pages),
        enable_8_bit=True,
    )
    file = FileCompressor()
    compressors = [file.chunk_compressor(stream, config) for stream in streams]
    for compressor in compressors:
        yield file.write_header() + compressor.write_meta()
    for page in range(len(pages)):
        for compressor in compressors:
            yield compressor.write_page(page)


def _unsealed(delta: Buffer) -> tuple[_Info, memoryview]:
    """Return a delta's header and payload; raises `CorruptDelta`."""
    view = memoryview(delta).cast("B")
    if len(view) < HEADER.size:
        raise CorruptDelta(f"a delta has at least {HEADER.size} bytes, this has {len(view)}: pull whole")
    magic, version, width, n_values, n_changed, checksum = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDelta("this is not a delta, which starts with RBWD: pull whole")
    if version != FORMAT_VERSION:
        raise CorruptDelta(f"the delta has format {version}, this process reads {FORMAT_VERSION}: pull whole")
    if _checksum(view[: CHECKED_HEADER.size], view[HEADER.size :]) != checksum:
        raise CorruptDelta("the delta's checksum does not match: pull whole")
    if width not in _VALUES or n_values * width > CHUNK_BYTES or n_changed > n_values:
        raise CorruptDelta(f"the delta declares {n_changed} changes among {n_values} values of {width} bytes")
    return _Info(width, n_values, n_changed), view[HEADER.size :]


def _checksum(*blocks: Buffer) -> bytes:
    state = blake3()
    for block in blocks:
        state.update(block)
    return state.digest(length=8)


def _pages(info: _Info, payload: memoryview) -> Iterator[tuple[NDArray[np.int64], Values]]:
    """Yield positions, ascending, and differences, a page at a time; raises `CorruptDelta`."""
    blobs = _blobs(payload)
    room = min(PAGE, info.n_changed)
    streams = [np.empty(room, _GAPS), np.empty(room, _VALUES[info.width])]
    readers = [_reader(next(blobs, b""), stream.itemsize) for stream in streams if room]
    end = 0
    """The first position after those of the page before."""
    for start in range(0, info.n_changed, PAGE):
        gaps, differences = (stream[: info.n_changed - start] for stream in streams)
        for reader, page in zip(readers, (gaps, differences), strict=True):
            _read_page(reader, next(blobs, b""), page)
        positions = np.cumsum(gaps, dtype=np.int64)
        positions += np.arange(end, end + len(gaps))
        end = int(positions[-1]) + 1
        if end > info.n_values:
            raise CorruptDelta(f"the delta changes position {end - 1} among {info.n_values} values")
        yield positions, _unzigzag(differences)
    if next(blobs, None) is not None:
        raise CorruptDelta(f"the delta continues after its {info.n_changed} changes")


def _blobs(payload: memoryview) -> Iterator[bytes]:
    while payload:
        if len(payload) < LENGTH.size or len(payload) - LENGTH.size < (n := LENGTH.unpack_from(payload)[0]):
            raise CorruptDelta("the delta is truncated")
        yield bytes(payload[LENGTH.size : LENGTH.size + n])
        payload = payload[LENGTH.size + n :]


def _reader(metadata: bytes, width: int) -> ChunkDecompressor:
    try:
        file, at = FileDecompressor.new(metadata)
        if metadata[at : at + 1] != CLASSIC:
            raise CorruptDelta("the delta's streams are in a mode that no encoder writes")
        reader, n_bytes = file.chunk_decompressor(metadata[at:], f"u{8 * width}")
    except RuntimeError as error:
        raise CorruptDelta(f"the delta's streams cannot be read: {error}") from error
    if at + n_bytes != len(metadata):
        raise CorruptDelta("the delta's metadata has bytes after its end")
    return reader


def _read_page(reader: ChunkDecompressor, page: bytes, into: NDArray[Any]) -> None:
    """Fill `into`, which has the size of the page; raises `CorruptDelta`."""
    try:
        _, n_bytes = reader.read_page_into(page, len(into), into)
    except RuntimeError as error:
        raise CorruptDelta(f"the delta's streams cannot be read: {error}") from error
    if n_bytes != len(page):
        raise CorruptDelta("a page of the delta has bytes after its end")


def _zigzag(differences: Values) -> Values:
    """Return 0, 1, 2, 3, 4, ... for 0, -1, 1, -2, 2, ... modulo 2^bits: small steps are small numbers."""
    return (differences << 1) ^ -(differences >> (8 * differences.itemsize - 1))


def _unzigzag(numbers: Values) -> Values:
    """Invert `_zigzag`."""
    return (numbers >> 1) ^ -(numbers & 1)
