"""Encodes, applies and composes deltas."""

from __future__ import annotations

import numpy as np

from rlboost.shared.weights.codec import kernels
from rlboost.shared.weights.codec.arrays import VALUE_TYPES, Positions, Steps, Values
from rlboost.shared.weights.codec.blob import HEADER, MAX_VALUES, WIDTHS, Buffer, CorruptDelta, Info, Kind, seal, unseal
from rlboost.shared.weights.codec.sections import HIGH, LOW, Sections, pack_steps, rice_k


def encode(base: Buffer, new: Buffer, dtype: str, kind: Kind | None = None) -> bytes:
    """Return the delta that turns `base` into `new`, bit for bit.

    Args:
        base: little-endian values; not read for a dense delta.
        new: as many values.
        dtype: torch name of the dtype. A dtype without steps (see `WIDTHS`) is opaque bytes: its deltas are dense.
        kind: None for the smallest: rice or bitmap by density, or dense where that is not larger. An explicit kind
            is used whatever its size.

    Raises:
        ValueError: the lengths differ or are not a multiple of the dtype's width, or the dtype has no steps.

    """
    info = _info(new, dtype)
    n_bytes = len(memoryview(base).cast("B"))
    if kind != Kind.DENSE and n_bytes != info.n_bytes:
        raise ValueError(f"the base has {n_bytes} bytes, the new values {info.n_bytes}")
    if kind == Kind.DENSE or (kind is None and info.dtype not in WIDTHS):
        return seal(info, [new])
    if info.dtype not in WIDTHS:
        raise ValueError(f"{dtype} has no steps: encode it as dense")
    positions, steps = kernels.active().diff(_values(base, info), _values(new, info))
    delta = _encode_steps(positions, steps, info, kind)
    return delta if kind is not None or len(delta) < HEADER.size + info.n_bytes else seal(info, [new])


def apply(base: Buffer, delta: Buffer) -> bytes:
    """Return the values that the delta makes of the base.

    Raises:
        CorruptDelta: the delta is damaged, or is for a base of another length.

    """
    info, payload = unseal(delta)
    _check_length(base, info)
    if info.kind == Kind.DENSE:
        _check_dense(payload, info)
        return bytes(payload)
    target = bytearray(base)
    _add(_values(target, info), info, payload)
    return bytes(target)


def apply_into(target: bytearray | memoryview, delta: Buffer) -> None:
    """Apply the delta to the base in `target`, in place.

    Raises:
        CorruptDelta: the delta is damaged, or is for a base of another length; the target is unchanged.

    """
    info, payload = unseal(delta)
    _check_length(target, info)
    if info.kind == Kind.DENSE:
        _check_dense(payload, info)
        memoryview(target).cast("B")[:] = payload
    else:
        _add(_values(target, info), info, payload)


def compose(first: Buffer, second: Buffer) -> bytes:
    """Return one delta with the effect of `first` followed by `second`.

    Raises:
        CorruptDelta: one is damaged, or they are for bases of different lengths or dtypes.

    """
    (one, one_payload), (two, two_payload) = unseal(first), unseal(second)
    if (one.dtype, one.n_values) != (two.dtype, two.n_values):
        raise CorruptDelta(f"a delta of {two.n_values} {two.dtype} cannot follow one of {one.n_values} {one.dtype}")
    if two.kind == Kind.DENSE:
        _check_dense(two_payload, two)
        return bytes(second)
    if one.kind == Kind.DENSE:
        return encode(b"", apply(one_payload, second), one.dtype, Kind.DENSE)
    run = kernels.active()
    left, right = Sections(one, one_payload), Sections(two, two_payload)
    positions, steps = run.merge(left.positions(run), left.steps(run), right.positions(run), right.steps(run))
    return _encode_steps(positions, steps, one, None)


def _info(new: Buffer, dtype: str) -> Info:
    name = dtype if dtype in WIDTHS else "bytes"
    n_bytes, width = len(memoryview(new).cast("B")), WIDTHS.get(name, 1)
    if n_bytes % width:
        raise ValueError(f"{n_bytes} bytes are not a whole number of {dtype}")
    if n_bytes // width > MAX_VALUES:
        raise ValueError(f"{n_bytes // width} values are too many for one delta: split them into chunks")
    return Info(Kind.DENSE, name, n_bytes // width, n_bytes // width)


def _values(data: Buffer, info: Info) -> Values:
    return np.frombuffer(data, dtype=VALUE_TYPES[info.width])


def _encode_steps(positions: Positions, steps: Steps, info: Info, kind: Kind | None) -> bytes:
    if kind is None:
        # A Rice code with parameter 0 is a bitmap, and slower to decode.
        is_sparse = not len(positions) or rice_k(info.n_values, len(positions)) > 0
        kind = Kind.RICE if is_sparse else Kind.BITMAP
    payload = pack_steps(kernels.active(), kind, positions, steps, info.n_values)
    return seal(info._replace(kind=kind, n_changed=len(positions)), payload)


def _check_length(base: Buffer, info: Info) -> None:
    n_bytes = len(memoryview(base).cast("B"))
    if n_bytes != info.n_bytes:
        raise CorruptDelta(f"the delta is for a base of {info.n_bytes} bytes, this has {n_bytes}")


def _check_dense(payload: memoryview, info: Info) -> None:
    if len(payload) != info.n_bytes or info.n_changed != info.n_values:
        raise CorruptDelta(f"the dense delta has {len(payload)} of {info.n_bytes} bytes")


def _add(target: Values, info: Info, payload: memoryview) -> None:
    """Add the steps to the target, after all of the delta has been checked."""
    run = kernels.active()
    sections = Sections(info, payload)
    if info.kind == Kind.BITMAP:
        run.add_bitmap(target, sections.cut_off(HIGH), sections.steps(run))
    elif not run.add_payload(target, payload, info.n_changed, sections.params):
        run.add_rice(target, sections.cut(LOW), sections.cut_off(HIGH), sections.params.k, sections.steps(run))
