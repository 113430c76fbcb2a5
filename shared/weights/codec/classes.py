"""The payload of a class delta: changes sorted by the exponent of what they change, a rice payload for each class.

Small weights change more often than large ones: their neighbours are nearer. Both sides have the base, so that its
exponents cost nothing to tell.
"""

from __future__ import annotations

import struct

import numpy as np

from shared.weights.codec.arrays import N_CLASSES, STEP_TYPES, Exponents, Positions, Ranked, Steps, Values
from shared.weights.codec.blob import Buffer, CorruptDelta, Info, Kind
from shared.weights.codec.kernels import Kernels
from shared.weights.codec.sections import Sections, pack_steps

TABLE = struct.Struct(f"<B7x{2 * N_CLASSES}I")
"""The top exponent, then for each class its changes, then for each class the bytes of its payload."""
_PLACES = {"bfloat16": (7, 255), "float16": (10, 31), "float32": (23, 255)}
"""Where the exponent is."""
_SAMPLE = 4096
"""Values that are looked at to choose the top exponent."""
_RARE = 300
"""Of so many values one may have an exponent above the top: a class of its own would be too small to pay."""


def pack_classes(kernels: Kernels, base: Values, positions: Positions, steps: Steps, dtype: str) -> list[Buffer]:
    """Return the payload of a class delta."""
    exponents = _exponents(base, dtype)
    ranked, sizes = kernels.rank(base, exponents, positions, steps)
    payloads, lengths, begin = list[Buffer](), list[int](), 0
    for count, size in zip(ranked.counts.tolist(), sizes.tolist(), strict=True):
        mine = slice(begin, begin + count)
        begin += count
        made = pack_steps(kernels, Kind.RICE, ranked.ranks[mine], ranked.steps[mine], size) if count else []
        payloads += made
        lengths.append(sum(len(piece) for piece in made))
    return [TABLE.pack(exponents.top, *ranked.counts.tolist(), *lengths), *payloads]


def unpack_classes(kernels: Kernels, base: Values, info: Info, payload: memoryview) -> tuple[Positions, Steps]:
    """Return where a class delta changes its base, and by which steps.

    Raises:
        CorruptDelta: it is damaged, or has more changes of a class than the base has values.

    """
    if len(payload) < TABLE.size:
        raise CorruptDelta(f"the delta's payload has only {len(payload)} bytes")
    top, *numbers = TABLE.unpack_from(payload)
    counts, lengths = numbers[:N_CLASSES], numbers[N_CLASSES:]
    shift, mask = _PLACES[info.dtype]
    if top > mask or any(payload[1:8]) or sum(counts) != info.n_changed:
        raise CorruptDelta(f"the delta has classes below {top} of {sum(counts)} and not {info.n_changed} changes")
    fit = all(n or not length for n, length in zip(counts, lengths, strict=True))
    if not fit or TABLE.size + sum(lengths) != len(payload):
        raise CorruptDelta(f"the delta's classes do not make up its payload of {len(payload)} bytes")
    rest = payload[TABLE.size :]
    ranks, steps = list[Positions](), list[Steps]()
    for count, length in zip(counts, lengths, strict=True):
        if count:
            sections = Sections(info._replace(kind=Kind.RICE, n_changed=count), rest[:length])
            ranks.append(sections.positions(kernels))
            steps.append(sections.steps(kernels))
            rest = rest[length:]
    ranked = Ranked(
        np.array(counts, dtype=np.uint32),
        np.concatenate([np.empty(0, dtype=np.uint32), *ranks]),
        np.concatenate([np.empty(0, dtype=STEP_TYPES[info.width]), *steps]),
    )
    return kernels.unrank(base, Exponents(shift, mask, top), ranked)


def _exponents(base: Values, dtype: str) -> Exponents:
    """Return the classes that suit these values, judged by a sample."""
    shift, mask = _PLACES[dtype]
    # An odd stride does not stay in one column of a matrix.
    sample = base[:: len(base) // _SAMPLE | 1]
    found = np.bincount((sample >> shift) & mask, minlength=mask + 1)
    above = np.cumsum(found[::-1])[::-1]
    common = np.flatnonzero(above * _RARE > len(sample))
    return Exponents(shift, mask, int(common[-1]) if len(common) else 0)
