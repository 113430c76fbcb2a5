"""Encode, apply, compose and invert deltas."""

from __future__ import annotations

import numpy as np

from shared.weights.codec import kernels
from shared.weights.codec.arrays import VALUE_TYPES, Positions, Steps, Values
from shared.weights.codec.blob import (
    HEADER,
    MAX_VALUES,
    STEP_KINDS,
    WIDTHS,
    BaseNeeded,
    Buffer,
    CorruptDelta,
    Info,
    Kind,
    seal,
    unseal,
)
from shared.weights.codec.classes import pack_classes, unpack_classes
from shared.weights.codec.sections import HIGH, LOW, SIGNS, Sections, pack_overwrite, pack_steps, rice_k


def encode(base: Buffer, new: Buffer, dtype: str, kind: Kind | None = None, *, small: bool = False) -> bytes:
    """Return what turns `base` into `new`, bit for bit.

    Args:
        base: little-endian values; not looked at for a dense delta.
        new: as many values.
        dtype: its name as torch's. One without steps (see `WIDTHS`) is taken as bytes.
        kind: None for steps, rice or bitmap by density, or dense where that is not larger. A kind that is named is
            what is made, whatever its size.
        small: also try the class kind, and take the smallest. For slow or costly links: it costs both sides a pass
            over all of the base (`docs/performance.md` says from where on that pays).

    Raises:
        ValueError: the lengths differ, or are no multiple of the dtype's, or the dtype has no steps.

    """
    info = _info(new, dtype)
    if kind == Kind.DENSE:
        return seal(info, [new])
    if len(memoryview(base).cast("B")) != info.n_bytes:
        raise ValueError(f"the base has {len(memoryview(base).cast('B'))} bytes, the new values {info.n_bytes}")
    before, after = _values(base, info), _values(new, info)
    if kind == Kind.OVERWRITE or (kind is None and info.dtype not in WIDTHS):
        delta = _encode_overwrite(before, after, info)
        return delta if kind is not None or len(delta) < HEADER.size + info.n_bytes else seal(info, [new])
    if info.dtype not in WIDTHS:
        raise ValueError(f"{dtype} has no steps: encode it as overwrite or dense")
    positions, steps = kernels.active().diff(before, after)
    if kind == Kind.CLASS:
        return _encode_classes(before, positions, steps, info)
    delta = _encode_steps(positions, steps, info, kind)
    if small and kind is None:
        delta = min(delta, _encode_classes(before, positions, steps, info), key=len)
    return delta if kind is not None or len(delta) < HEADER.size + info.n_bytes else seal(info, [new])


def apply(base: Buffer, delta: Buffer) -> bytes:
    """Return what the delta makes of the base.

    Raises:
        CorruptDelta: the delta is damaged, or is for a base of another length.

    """
    info, payload = unseal(delta)
    _check_length(base, info)
    if info.kind == Kind.DENSE:
        _check_dense(payload, info)
        return bytes(payload)
    target = bytearray(base)
    _apply(_values(target, info), info, payload)
    return bytes(target)


def apply_into(target: bytearray | memoryview, delta: Buffer) -> None:
    """Turn the base in `target` into what the delta makes of it, in place.

    Raises:
        CorruptDelta: the delta is damaged, or is for a base of another length; the target is as it was.

    """
    info, payload = unseal(delta)
    _check_length(target, info)
    if info.kind == Kind.DENSE:
        _check_dense(payload, info)
        memoryview(target).cast("B")[:] = payload
    else:
        _apply(_values(target, info), info, payload)


def compose(first: Buffer, second: Buffer, base: Buffer | None = None) -> bytes:
    """Return one delta that does what `first` and then `second` do.

    Two deltas with steps are added and two that overwrite are laid over each other; what comes before a dense delta
    does not matter. Every other pair needs the base of the first.

    Raises:
        CorruptDelta: one is damaged, or they are for bases of different lengths or dtypes.
        BaseNeeded: these kinds need the base, and it is not given.

    """
    (one, one_payload), (two, two_payload) = unseal(first), unseal(second)
    if (one.dtype, one.n_values) != (two.dtype, two.n_values):
        raise CorruptDelta(f"a delta of {two.n_values} {two.dtype} cannot follow one of {one.n_values} {one.dtype}")
    if two.kind == Kind.DENSE:
        _check_dense(two_payload, two)
        return bytes(second)
    if one.kind == Kind.DENSE:
        return encode(b"", apply(one_payload, second), one.dtype, Kind.DENSE)
    if one.kind in STEP_KINDS and two.kind in STEP_KINDS:
        run = kernels.active()
        mine, theirs = Sections(one, one_payload), Sections(two, two_payload)
        positions, steps = run.merge(mine.positions(run), mine.steps(run), theirs.positions(run), theirs.steps(run))
        return _encode_steps(positions, steps, one, None)
    if one.kind == two.kind == Kind.OVERWRITE:
        return _compose_overwrite(Sections(one, one_payload), Sections(two, two_payload))
    if base is None:
        raise BaseNeeded(f"composing {one.kind.name} and {two.kind.name} needs the base of the first: give it")
    return encode(base, apply(apply(base, first), second), one.dtype)


def invert(delta: Buffer, base: Buffer | None = None) -> bytes:
    """Return the delta that turns the result back into the base, which only one of the class kind needs to be given.

    Raises:
        CorruptDelta: the delta is damaged, or is not for this base.
        BaseNeeded: it is of the class kind, and the base is not given.
        ValueError: it has no steps, so that what it replaced is not in it.

    """
    info, payload = unseal(delta)
    if info.kind == Kind.CLASS:
        if base is None:
            raise BaseNeeded("a delta of kind CLASS says where it changes its base only together with it: give it")
        _check_length(base, info)
        positions, steps = unpack_classes(kernels.active(), _values(base, info), info, payload)
        return _encode_steps(positions, -steps, info, None)
    if info.kind not in STEP_KINDS:
        raise ValueError(f"a delta of kind {info.kind.name} cannot be inverted: it does not say what it replaces")
    run = kernels.active()
    sections = Sections(info, payload)
    return _encode_steps(sections.positions(run), -sections.steps(run), info, info.kind)


def _info(new: Buffer, dtype: str) -> Info:
    name = dtype if dtype in WIDTHS else "bytes"
    n_bytes, width = len(memoryview(new).cast("B")), WIDTHS.get(name, 1)
    if n_bytes % width:
        raise ValueError(f"{n_bytes} bytes are no whole number of {dtype}")
    if n_bytes // width > MAX_VALUES:
        raise ValueError(f"{n_bytes // width} values are too many for one delta: cut them into chunks")
    return Info(Kind.DENSE, name, n_bytes // width, n_bytes // width)


def _values(data: Buffer, info: Info) -> Values:
    return np.frombuffer(data, dtype=VALUE_TYPES[info.width])


def _encode_overwrite(before: Values, after: Values, info: Info) -> bytes:
    positions = np.flatnonzero(before != after).astype(np.uint32)
    return _seal_overwrite(positions, after[positions], info)


def _seal_overwrite(positions: Positions, values: Values, info: Info) -> bytes:
    payload = pack_overwrite(kernels.active(), positions, values.tobytes(), info.n_values)
    return seal(info._replace(kind=Kind.OVERWRITE, n_changed=len(positions)), payload)


def _encode_steps(positions: Positions, steps: Steps, info: Info, kind: Kind | None) -> bytes:
    if kind is None:
        # A Rice code of parameter 0 is a bitmap, and slower to read.
        few = not len(positions) or rice_k(info.n_values, len(positions)) > 0
        kind = Kind.RICE if few else Kind.BITMAP
    payload = pack_steps(kernels.active(), kind, positions, steps, info.n_values)
    return seal(info._replace(kind=kind, n_changed=len(positions)), payload)


def _encode_classes(before: Values, positions: Positions, steps: Steps, info: Info) -> bytes:
    payload = pack_classes(kernels.active(), before, positions, steps, info.dtype)
    return seal(info._replace(kind=Kind.CLASS, n_changed=len(positions)), payload)


def _compose_overwrite(first: Sections, second: Sections) -> bytes:
    run, info = kernels.active(), first.info
    positions = np.concatenate([second.positions(run), first.positions(run)])
    values = np.concatenate([_new_values(second), _new_values(first)])
    # Of a position in both, the first place is the second delta's.
    positions, places = np.unique(positions, return_index=True)
    return _seal_overwrite(positions, values[places], info)


def _new_values(sections: Sections) -> Values:
    info = sections.info
    return sections.cut_off(SIGNS).view(VALUE_TYPES[info.width])[: info.n_changed]


def _check_length(base: Buffer, info: Info) -> None:
    n_bytes = len(memoryview(base).cast("B"))
    if n_bytes != info.n_bytes:
        raise CorruptDelta(f"the delta is for a base of {info.n_bytes} bytes, this has {n_bytes}")


def _check_dense(payload: memoryview, info: Info) -> None:
    if len(payload) != info.n_bytes or info.n_changed != info.n_values:
        raise CorruptDelta(f"the dense delta has {len(payload)} of {info.n_bytes} bytes")


def _apply(target: Values, info: Info, payload: memoryview) -> None:
    """Change the target, but only when all of the delta is decoded and checked."""
    run = kernels.active()
    if info.kind == Kind.CLASS:
        run.add(target, *unpack_classes(run, target, info, payload))
        return
    sections = Sections(info, payload)
    if info.kind == Kind.OVERWRITE:
        target[sections.positions(run)] = _new_values(sections)
    elif info.kind == Kind.BITMAP:
        run.add_bitmap(target, sections.cut_off(HIGH), sections.steps(run))
    elif not run.add_payload(target, payload, info.n_changed, sections.params):
        run.add_rice(target, sections.cut(LOW), sections.cut_off(HIGH), sections.params.k, sections.steps(run))
