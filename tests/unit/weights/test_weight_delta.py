"""Deltas between versions of weights: bit-exact, composable, never a wrong result."""

from __future__ import annotations

import os
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec
from pcodec.wrapped import FileCompressor, FileDecompressor

from rlboost.shared.errors import Unprocessable
from rlboost.shared.weights.delta import CHECKED_HEADER, HEADER, PAGE, CorruptDelta, apply_delta
from rlboost.shared.weights.delta import compose_deltas as compose
from rlboost.shared.weights.delta import encode_delta as encode
from rlboost.shared.weights.manifest import CHUNK_BYTES, ITEM_BYTES
from tests.support.deltas import applied, blobs_of, resealed, sealed, with_blobs

GOLDEN = Path(__file__).parents[2] / "golden" / "delta"
DTYPES = ["float8_e4m3fn", "bfloat16", "float16", "float32", "int64"]
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x7C00, 0x7E01, 0x3F80]
"""Of 16 bits: zeros, infinities, NaNs and denormal numbers."""


def unsigned(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{ITEM_BYTES[dtype]}")


@st.composite
def versions(draw: st.DrawFn, dtype: str, count: int = 2) -> list[bytes]:
    """Draw versions of values: some move by a few steps, some become arbitrary patterns."""
    n = draw(st.integers(1, 300))
    seed, density = draw(st.integers(0, 1 << 32)), draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.6, 1.0]))
    rng = np.random.default_rng(seed)
    kind = unsigned(dtype)
    values = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    made = [values.tobytes()]
    for _ in range(count - 1):
        values = values.copy()
        moved = rng.random(n) < density
        values[moved] += rng.integers(-2, 3, int(moved.sum())).astype(kind)
        for pattern in draw(st.lists(st.integers(0, int(np.iinfo(kind).max)), max_size=3)):
            values[draw(st.integers(0, n - 1))] = pattern
        made.append(values.tobytes())
    return made


def weights(n: int, changed: float, seed: int = 0) -> tuple[bytes, bytes]:
    """Return bfloat16 patterns before and after a fraction `changed` moved, one in ten by more than one step."""
    rng = np.random.default_rng(seed)
    before = (rng.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice([-1, 1], n) * np.where(rng.random(n) < 0.1, rng.integers(2, 40, n), 1)
    return before.tobytes(), np.where(rng.random(n) < changed, before + steps, before).astype(np.uint16).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_delta_between_any_bit_patterns_is_exact(data: st.DataObject, dtype: str) -> None:
    base, new = data.draw(versions(dtype))
    assert applied(base, encode(base, new, dtype)) == new


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_composed_delta_equals_applying_both(data: st.DataObject, dtype: str) -> None:
    base, middle, new = data.draw(versions(dtype, 3))
    composed = compose(encode(base, middle, dtype), encode(middle, new, dtype))
    assert applied(base, composed) == new
    assert composed == encode(base, new, dtype)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_composing_is_associative(data: st.DataObject) -> None:
    made = data.draw(versions("float16", 4))
    one, two, three = (encode(a, b, "float16") for a, b in pairwise(made))
    assert compose(compose(one, two), three) == compose(one, compose(two, three)) == encode(made[0], made[3], "float16")


def test_a_delta_and_the_one_back_compose_to_no_change() -> None:
    base, new = weights(1000, 0.3)
    composed = compose(encode(base, new, "bfloat16"), encode(new, base, "bfloat16"))
    assert len(composed) == HEADER.size
    assert applied(base, composed) == base


def test_minus_zero_nan_payloads_and_infinities_are_changes() -> None:
    base = np.array(SPECIAL, dtype=np.uint16)
    new = np.roll(base, 1)
    assert applied(base.tobytes(), encode(base.tobytes(), new.tobytes(), "bfloat16")) == new.tobytes()


@pytest.mark.parametrize("n_changed", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 7])
def test_changes_around_a_page_are_exact(n_changed: int) -> None:
    base, new = np.zeros(3 * PAGE, dtype=np.uint16), np.zeros(3 * PAGE, dtype=np.uint16)
    new[np.random.default_rng(1).choice(3 * PAGE, n_changed, replace=False)] = 1
    delta = encode(base.tobytes(), new.tobytes(), "bfloat16")
    assert applied(base.tobytes(), delta) == new.tobytes()
    assert len(blobs_of(delta)) == 2 + 2 * -(-n_changed // PAGE)


@pytest.mark.parametrize(("changed", "most"), [(0.01, 1.4), (0.05, 1.2), (0.28, 0.9)])
def test_whole_chunk_needs_about_a_byte_per_change(changed: float, most: float) -> None:
    base, new = weights(CHUNK_BYTES // 2, changed)
    delta = encode(base, new, "bfloat16")
    assert applied(base, delta) == new
    assert len(delta) < most * changed * CHUNK_BYTES / 2


def test_buffers_may_begin_anywhere_in_memory() -> None:
    base, new = weights(3001, 0.1)
    delta = encode(memoryview(b"x" + base)[1:], memoryview(b"yyy" + new)[3:], "bfloat16")
    target = memoryview(bytearray(b"z" + base))[1:]
    apply_delta(target, memoryview(b"?" + delta)[1:])
    assert target == new


@pytest.mark.parametrize(
    ("base", "new"), [(b"abcd", b"ab"), (b"abc", b"abc"), (bytes(CHUNK_BYTES + 2), bytes(CHUNK_BYTES + 2))]
)
def test_encode_refuses_what_is_no_pair_of_chunks(base: bytes, new: bytes) -> None:
    with pytest.raises(ValueError, match=f"a base of {len(base)} and new values of {len(new)} bytes"):
        encode(base, new, "bfloat16")


def test_deltas_of_different_chunks_do_not_compose() -> None:
    one = encode(bytes(8), bytes(8), "bfloat16")
    for other in (encode(bytes(6), bytes(6), "bfloat16"), encode(bytes(8), bytes(8), "float32")):
        with pytest.raises(CorruptDelta, match="cannot follow"):
            compose(one, other)


def test_a_delta_for_another_length_is_refused() -> None:
    base, new = weights(100, 0.2)
    for other in (b"", base[:-2], base + bytes(2)):
        with pytest.raises(CorruptDelta, match="for a base of 200 bytes"):
            applied(other, encode(base, new, "bfloat16"))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["dense", "rice", "bitmap"])
def test_delta_of_an_older_format_is_refused_with_what_to_do(kind: int) -> None:
    """Format 2 had a kind and a dtype where this one has the width."""
    old = sealed(struct.pack("<4sBBBBII", b"RBWD", 2, kind, 1, 0, 4, 4), bytes(8))
    assert issubclass(CorruptDelta, Unprocessable)
    with pytest.raises(CorruptDelta, match="format 2, this process reads 3: pull whole"):
        applied(bytes(8), old)
    with pytest.raises(CorruptDelta, match="format 2, this process reads 3: pull whole"):
        compose(old, old)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, 0, "with RBWD"),
        (4, 9, "format 9"),
        (5, 3, "of 3 bytes"),
        (8, 200, "for a base"),
        (12, 5, "5 changes"),
    ],
)
def test_foreign_header_is_refused_with_the_reason(at: int, value: int, text: str) -> None:
    delta = bytearray(encode(bytes(8), bytes(8), "bfloat16"))
    delta[at] = value
    with pytest.raises(CorruptDelta, match=text):
        applied(bytes(8), resealed(bytes(delta)))


def test_no_truncated_flipped_or_spliced_delta_is_accepted() -> None:
    base, new = weights(150, 0.2)
    delta, other = encode(base, new, "bfloat16"), encode(new, base, "bfloat16")
    damaged = [delta[:length] for length in range(len(delta))]
    damaged += [delta + bytes(8), delta * 2, delta[: HEADER.size] + other[HEADER.size :]]
    for bit in range(len(delta) * 8):
        flipped = bytearray(delta)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        damaged.append(bytes(flipped))
    for bad in damaged:
        target = bytearray(base)
        with pytest.raises(CorruptDelta):
            apply_delta(target, bad)
        assert target == base


def test_position_after_the_end_is_refused() -> None:
    delta = encode(bytes(2000), bytes(1998) + b"\1\0", "bfloat16")
    header = CHECKED_HEADER.pack(b"RBWD", 3, 2, 999, 1)
    with pytest.raises(CorruptDelta, match="position 999 among 999 values"):
        applied(bytes(1998), sealed(header, delta[HEADER.size :]))


@pytest.mark.parametrize("change", ["one more", "one less", "longer metadata", "longer page"])
def test_payload_with_more_or_less_than_its_changes_is_refused(change: str) -> None:
    base, new = weights(1000, 0.2)
    delta = encode(base, new, "bfloat16")
    blobs = blobs_of(delta)
    other = {
        "one more": [*blobs, b""],
        "one less": blobs[:-1],
        "longer metadata": [blobs[0] + b"\0", *blobs[1:]],
        "longer page": [*blobs[:-1], blobs[-1] + b"\0"],
    }[change]
    assert applied(base, with_blobs(delta, blobs)) == new
    with pytest.raises(CorruptDelta):
        applied(base, with_blobs(delta, other))


def test_streams_in_another_mode_of_the_library_are_refused() -> None:
    """They may declare windows and dictionaries of any size, for which the library allocates memory."""
    gaps = np.tile(np.arange(0, 90, 30, dtype=np.uint32), 400)
    n = len(gaps)
    delta = encode(bytes(200 * n), b"\1\0" * n + bytes(198 * n), "bfloat16")
    specs = [
        (ModeSpec.classic(), DeltaSpec.try_lookback()),
        (ModeSpec.classic(), DeltaSpec.try_consecutive(1)),
        (ModeSpec.try_int_mult(30), DeltaSpec.no_op()),
        (ModeSpec.try_dict(), DeltaSpec.no_op()),
    ]
    for mode, spec in specs:
        file = FileCompressor()
        compressor = file.chunk_compressor(gaps, ChunkConfig(mode_spec=mode, delta_spec=spec))
        _, metadata, _, page = blobs_of(delta)
        forged = [file.write_header() + compressor.write_meta(), metadata, compressor.write_page(0), page]
        with pytest.raises(CorruptDelta, match="mode that no encoder writes"):
            applied(bytes(200 * n), with_blobs(delta, forged))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "int64"])
def test_small_delta_with_millions_of_changes_allocates_less_than_its_chunk(dtype: str) -> None:
    base = bytearray(CHUNK_BYTES)
    new = np.ones(CHUNK_BYTES // ITEM_BYTES[dtype], dtype=unsigned(dtype)).tobytes()
    delta = encode(base, new, dtype)
    assert len(delta) < 4096
    tracemalloc.start()
    apply_delta(base, delta)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert base == new
    assert peak < CHUNK_BYTES


def golden_case(dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what is in a golden file, from arithmetic that any language has."""
    index = np.arange(1000, dtype=np.uint64)
    before = (index * 40503 + 12345) % (1 << 8 * ITEM_BYTES[dtype])
    steps = np.where((index * 7919) % 100 < 12, np.where(index % 9 == 0, index % 37 + 2, 1), 0)
    return before.astype(unsigned(dtype)), (before + steps).astype(unsigned(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_golden_file_is_read_by_the_codec_and_by_the_page(dtype: str) -> None:
    """The second reader is written from `docs/weights-format.md` alone: the page is complete."""
    before, after = golden_case(dtype)
    file = GOLDEN / f"{dtype}.delta"
    if os.environ.get("RLBOOST_WRITE_GOLDEN") == "1":
        file.write_bytes(encode(before.tobytes(), after.tobytes(), dtype))
    delta = file.read_bytes()
    assert applied(before.tobytes(), delta) == after.tobytes()

    width = ITEM_BYTES[dtype]
    n_changed = int((before != after).sum())
    assert delta[:16] == b"RBWD" + struct.pack("<BBxxII", 3, width, 1000, n_changed)
    assert delta[16:24] == blake3(delta[:16] + delta[24:]).digest()[:8]
    gaps_metadata, differences_metadata, gaps_page, differences_page = blobs_of(delta)
    streams = []
    for metadata, page, bits in ((gaps_metadata, gaps_page, 32), (differences_metadata, differences_page, 8 * width)):
        header, at = FileDecompressor.new(metadata)
        reader, _ = header.chunk_decompressor(metadata[at:], f"u{bits}")
        stream = np.zeros(n_changed, dtype=f"u{bits // 8}")
        reader.read_page_into(page, n_changed, stream)
        streams.append(stream.tolist())
    values, position = before.tolist(), -1
    for gap, number in zip(*streams, strict=True):
        position += gap + 1
        difference = number // 2 if number % 2 == 0 else -(number + 1) // 2
        values[position] = (values[position] + difference) % (1 << 8 * width)
    assert values == after.tolist()
