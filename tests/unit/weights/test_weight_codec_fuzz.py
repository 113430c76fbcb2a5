"""Hostile deltas are refused or read identically by all implementations, without a crash or excessive memory.

The checksum is recomputed after every change, so that the parser has to detect the damage.
"""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.shared.weights import codec
from rlboost.shared.weights.codec import CorruptDelta, Kind, kernels
from rlboost.shared.weights.codec.blob import CHECKED_HEADER, FORMAT_VERSION, HEADER, WIDTHS

EXAMPLES = int(os.environ.get("RLBOOST_FUZZ_EXAMPLES", "15"))
IMPLEMENTATIONS = list(kernels.available())
DTYPES = sorted(WIDTHS)
KINDS = list(Kind)
N = 260
MUCH = 1 << 20
BYTES_FOR_EACH = 1000
"""Of memory for a byte of delta and base; numpy's implementation has arrays of 8 bytes for every bit."""


def repaired(delta: bytes) -> bytes:
    """Return the delta with the checksum that its bytes should have."""
    checked, payload = delta[: CHECKED_HEADER.size], delta[HEADER.size :]
    return checked + blake3(checked + payload).digest(length=8) + payload


def pair(seed: int, dtype: str, density: float) -> tuple[bytes, bytes]:
    """Return two versions of values: most move by one step, some by many, some become arbitrary."""
    rng = np.random.default_rng(seed)
    kind = np.uint32 if WIDTHS[dtype] == 4 else np.uint16
    base = rng.integers(0, np.iinfo(kind).max, N, dtype=kind, endpoint=True)
    if seed % 2:
        base >>= kind(2)
    moved = rng.random(N) < density
    new = np.where(moved, base + rng.choice(np.array([1, -1, 1, -1, 7, -300]).astype(kind), N), base)
    new[rng.random(N) < density / 20] = rng.integers(0, np.iinfo(kind).max)
    return base.tobytes(), new.tobytes()


@st.composite
def hostile(draw: st.DrawFn, delta: bytes) -> bytes:
    """Damage a delta in several ways and recompute its checksum."""
    made = bytearray(delta)
    for _ in range(draw(st.integers(1, 4))):
        place = st.integers(4, 15) | st.integers(24, min(len(made), 24 + 200) - 1) | st.integers(24, len(made) - 1)
        how = draw(st.sampled_from(["flip", "flip", "byte", "number", "cut", "swap", "repeat", "grow"]))
        at = draw(place)
        word = at & ~7
        if how == "flip":
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "byte":
            made[at] = draw(st.sampled_from([0, 1, 8, 24, 30, 31, 127, 128, 255]))
        elif how == "number":
            number = draw(st.integers(0, N + 70) | st.sampled_from([8, 1 << 16, (1 << 30) - 1, 1 << 30, (1 << 32) - 8]))
            made[at & ~3 : (at & ~3) + 4] = number.to_bytes(4, "little")
        elif how == "cut":
            del made[max(25, at) :]
        elif how == "swap":
            other = draw(st.integers(24, len(made) - 1)) & ~7
            if word >= 24 and max(word, other) + 8 <= len(made):
                made[word : word + 8], made[other : other + 8] = made[other : other + 8], made[word : word + 8]
        elif how == "repeat":
            made[at:at] = made[at : at + draw(st.sampled_from([1, 8, 64]))]
        else:
            made += draw(st.sampled_from([bytes(1), bytes(8), b"\xff" * 8, bytes(made[24:])]))
        if len(made) < 25:
            break
    return repaired(bytes(made))


def outcome(base: bytes, delta: bytes) -> bytes | None:
    """Return the result, or None for a refusal that left the target as it was."""
    target = bytearray(base)
    try:
        codec.apply_into(target, delta)
    except CorruptDelta:
        assert target == base
        return None
    assert len(target) == len(base)
    return bytes(target)


def outcomes(base: bytes, delta: bytes) -> bytes | None:
    """Return the common result of all implementations, each with bounded memory."""
    found = set()
    for name in IMPLEMENTATIONS:
        with kernels.using(name):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            found.add(outcome(base, delta))
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < BYTES_FOR_EACH * (len(base) + len(delta)) + MUCH, f"{name} took {taken} bytes"
    (only,) = found
    return only


def check_exact(base: bytes, delta: bytes, new: bytes) -> None:
    """Check that an accepted delta composes and can be encoded again exactly."""
    kind, dtype = codec.inspect(delta).kind, codec.inspect(delta).dtype
    assert codec.apply(base, codec.compose(delta, codec.encode(new, base, dtype))) == base
    if kind != Kind.DENSE:
        assert codec.apply(new, codec.encode(new, base, dtype, kind)) == base
        assert codec.apply(base, codec.encode(base, new, dtype, kind)) == new


@pytest.fixture(autouse=True, scope="module")
def traced() -> object:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 15, database=None)
@given(data=st.data())
def test_a_damaged_delta_is_refused_or_read_exactly(kind: Kind, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    density = data.draw(st.sampled_from([0.01, 0.1, 0.3, 0.9]))
    base, new = pair(data.draw(st.integers(0, 1 << 16)), dtype, density)
    delta = data.draw(hostile(codec.encode(base, new, dtype, kind)))
    found = outcomes(base, delta)
    if found is not None:
        check_exact(base, delta, found)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(5, EXAMPLES // 5), deadline=None, derandomize=EXAMPLES <= 15, database=None)
@given(data=st.data())
def test_long_delta_with_flipped_bits_is_refused_or_read_exactly(kind: Kind, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    base = rng.normal(0, 0.02, 30_000).astype(np.float32).view(np.uint16)[1::2]
    new = np.where(rng.random(30_000) < 0.18, base + rng.choice(np.array([1, -1, 5], dtype=np.int16), 30_000), base)
    delta = bytearray(codec.encode(base.tobytes(), new.astype(np.uint16).tobytes(), "bfloat16", kind))
    for _ in range(data.draw(st.integers(1, 3))):
        delta[data.draw(st.integers(24, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = outcomes(base.tobytes(), repaired(bytes(delta)))
    if found is not None:
        check_exact(base.tobytes(), repaired(bytes(delta)), found)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(10, EXAMPLES // 2), deadline=None, derandomize=EXAMPLES <= 15, database=None)
@given(data=st.data())
def test_delta_on_another_base_is_refused_or_applied_exactly(kind: Kind, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    base, new = pair(data.draw(st.integers(0, 1 << 16)), dtype, 0.2)
    other, _ = pair(data.draw(st.integers(0, 1 << 16)), dtype, 0.2)
    delta = codec.encode(base, new, dtype, kind)
    again = outcomes(new, delta)
    if kind == Kind.DENSE:
        assert again == new
    for target in (new, other):
        found = outcomes(target, delta)
        assert found is not None
        check_exact(target, delta, found)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 15, database=None)
@given(payload=st.binary(max_size=200), kind=st.integers(0, 4), dtype=st.integers(0, 4), n_changed=st.integers(0, N))
def test_a_delta_of_any_bytes_is_refused_or_read_alike(payload: bytes, kind: int, dtype: int, n_changed: int) -> None:
    header = CHECKED_HEADER.pack(b"RBWD", FORMAT_VERSION, kind, dtype, 0, N, n_changed)
    for width in (1, 2, 4):
        outcomes(bytes(N * width), repaired(header + bytes(8) + payload))
