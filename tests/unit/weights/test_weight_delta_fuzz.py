"""Hostile deltas are refused or applied within bounds: no crash, no hang, no other error, no excessive memory.

The checksum is recomputed after every change, so that the decoder has to detect the damage. A forged delta that it
accepts is a valid one for other values, which the digest of the chunk refuses: see `shared.weights.puller`.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.shared.weights.delta import CHECKED_HEADER, FORMAT_VERSION, HEADER, CorruptDelta, apply_delta
from rlboost.shared.weights.delta import compose_deltas as compose
from rlboost.shared.weights.delta import encode_delta as encode
from rlboost.shared.weights.manifest import ITEM_BYTES
from tests.support.deltas import applied, blobs_of, resealed, sealed, with_blobs

EXAMPLES = int(os.environ.get("RLBOOST_FUZZ_EXAMPLES", "60"))
DTYPES = ["float8_e4m3fn", "bfloat16", "float32", "int64"]
N = 700
MUCH = 1 << 20
"""More than a delta of a page of changes may take, in bytes."""

fuzzed = settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 60, database=None)


def pair(seed: int, dtype: str, density: float) -> tuple[bytes, bytes]:
    """Return two versions of values: most move by one step, some by many, some become arbitrary."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(f"u{ITEM_BYTES[dtype]}")
    base = rng.integers(0, np.iinfo(kind).max, N, dtype=kind, endpoint=True)
    moved = rng.random(N) < density
    new = np.where(moved, base + rng.choice(np.array([1, -1, 1, -1, 7, -300]).astype(kind), N), base)
    new[rng.random(N) < density / 20] = rng.integers(0, np.iinfo(kind).max, dtype=kind)
    return base.tobytes(), new.tobytes()


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Damage bytes in several ways."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not made:
            break
        at = draw(st.integers(0, len(made) - 1) | st.integers(0, min(len(made) - 1, 40)))
        how = draw(st.sampled_from(["flip", "flip", "byte", "number", "cut", "repeat", "grow"]))
        if how == "flip":
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "byte":
            made[at] = draw(st.sampled_from([0, 1, 4, 8, 15, 16, 127, 128, 255]))
        elif how == "number":
            number = draw(st.integers(0, N + 70) | st.sampled_from([1 << 16, 1 << 22, (1 << 30) - 1, (1 << 32) - 1]))
            made[at & ~3 : (at & ~3) + 4] = number.to_bytes(4, "little")
        elif how == "cut":
            del made[at:]
        elif how == "repeat":
            made[at:at] = made[at : at + draw(st.sampled_from([1, 8, 64]))]
        else:
            made += draw(st.sampled_from([bytes(1), bytes(8), b"\xff" * 8]))
    return bytes(made)


def check_hostile(base: bytes, delta: bytes, dtype: str) -> None:
    """Check that a delta is refused, or applied like any other: exactly, and with bounded memory."""
    target = bytearray(base)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        apply_delta(target, delta)
    except CorruptDelta:
        return
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < MUCH + len(delta)
        assert len(target) == len(base)
    # Differences depend on no base: those of an accepted delta are the same on any.
    assert applied(base, encode(base, target, dtype)) == target
    assert applied(base, compose(delta, encode(target, base, dtype))) == base


@pytest.fixture(autouse=True, scope="module")
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@fuzzed
@given(data=st.data())
def test_a_mutated_delta_is_refused_or_applied_exactly(data: st.DataObject) -> None:
    dtype, density = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([0.01, 0.1, 0.3, 0.9]))
    base, new = pair(data.draw(st.integers(0, 1 << 16)), dtype, density)
    delta = data.draw(mutated(encode(base, new, dtype)))
    check_hostile(base, resealed(delta) if len(delta) >= HEADER.size else delta, dtype)


@fuzzed
@given(data=st.data())
def test_a_delta_with_mutated_streams_is_refused_or_applied_exactly(data: st.DataObject) -> None:
    """The lengths of metadata and pages are right, so that the library reads what is damaged."""
    dtype, density = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([0.01, 0.1, 0.3, 0.9]))
    base, new = pair(data.draw(st.integers(0, 1 << 16)), dtype, density)
    delta = encode(base, new, dtype)
    blobs = blobs_of(delta)
    for at in data.draw(st.lists(st.integers(0, max(len(blobs) - 1, 0)), min_size=1, max_size=3)):
        if blobs:
            blobs[at] = data.draw(mutated(blobs[at]))
    check_hostile(base, with_blobs(delta, blobs), dtype)


@fuzzed
@given(payload=st.binary(max_size=300), width=st.integers(0, 9), n_changed=st.integers(0, N + 1))
def test_random_bytes_are_refused_or_applied_exactly(payload: bytes, width: int, n_changed: int) -> None:
    header = CHECKED_HEADER.pack(b"RBWD", FORMAT_VERSION, width, N, n_changed)
    for dtype in DTYPES:
        check_hostile(bytes(N * ITEM_BYTES[dtype]), sealed(header, payload), dtype)
        check_hostile(bytes(N * ITEM_BYTES[dtype]), payload, dtype)


@fuzzed
@given(data=st.data())
def test_random_streams_are_refused_or_applied_exactly(data: st.DataObject) -> None:
    base, new = pair(1, "bfloat16", 0.5)
    random = [data.draw(st.binary(max_size=60)) for _ in range(4)]
    gate = [b"\x04\x01\x00", b"\x04\x01\x00", b"", b""]
    blobs = [start + rest for start, rest in zip(gate, random, strict=True)]
    check_hostile(base, with_blobs(encode(base, new, "bfloat16"), blobs), "bfloat16")
