"""Deltas between versions of weights: bit-exact, identical from every implementation, never a wrong result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.shared.errors import Unprocessable
from rlboost.shared.weights import codec
from rlboost.shared.weights.codec import CorruptDelta, Info, Kind, kernels
from rlboost.shared.weights.codec.arrays import Params
from rlboost.shared.weights.codec.blob import HEADER, MAX_VALUES, WIDTHS, seal, unseal
from rlboost.shared.weights.codec.sections import GUARD, PARAMS, Sections, golomb_k, rice_bits, rice_k
from tests.support.golden_deltas import GOLDEN, golden_case

STEPPED = sorted(WIDTHS)
SPARSE = [Kind.RICE, Kind.BITMAP]
IMPLEMENTATIONS = list(kernels.available())
TYPES: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "int8": np.uint8}
SPECIAL = {2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x7C00, 0x7E01, 0x3F80]}
SPECIAL[4] = [
    0x00000000,
    0x80000000,
    0x7F800000,
    0xFF800000,
    0x7FC00001,
    0xFFFFFFFF,
    0x00000001,
    0x80000001,
    0x3F800000,
]
MINUS_ZERO = 0x8000


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using(request.param):
        yield request.param


def patterns(dtype: str) -> st.SearchStrategy[int]:
    width = WIDTHS.get(dtype, 1)
    anything = st.integers(0, (1 << (8 * width)) - 1)
    return anything | st.sampled_from(SPECIAL[width]) if width in SPECIAL else anything


@st.composite
def versions(draw: st.DrawFn, dtype: str, count: int = 2) -> list[bytes]:
    """Draw versions of values: some move by a few steps, some become arbitrary patterns."""
    n = draw(st.integers(0, 300))
    seed, density = draw(st.integers(0, 1 << 32)), draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.6, 1.0]))
    rng = np.random.default_rng(seed)
    kind = TYPES[dtype]
    values = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    made = [values.tobytes()]
    for _ in range(count - 1):
        values = values.copy()
        moved = rng.random(n) < density
        values[moved] += rng.integers(-2, 3, int(moved.sum())).astype(kind)
        if n:
            for pattern in draw(st.lists(patterns(dtype), max_size=3)):
                values[draw(st.integers(0, n - 1))] = pattern
        made.append(values.tobytes())
    return made


def weights(n: int, changed: float, seed: int = 0) -> tuple[bytes, bytes]:
    """Return bfloat16 patterns before and after a fraction `changed` moved, one in ten by more than one step."""
    rng = np.random.default_rng(seed)
    before = (rng.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice([-1, 1], n) * np.where(rng.random(n) < 0.1, rng.integers(2, 40, n), 1)
    return before.tobytes(), np.where(rng.random(n) < changed, before + steps, before).astype(np.uint16).tobytes()


def bf16(*values: int) -> bytes:
    return np.array(values, dtype=np.uint16).tobytes()


@pytest.mark.parametrize("kind", [None, Kind.DENSE, *SPARSE])
@pytest.mark.parametrize("dtype", STEPPED)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_delta_between_any_bit_patterns_is_identical_from_all_kernels(
    data: st.DataObject, dtype: str, kind: Kind | None
) -> None:
    base, new = data.draw(versions(dtype))
    made = set()
    for name in IMPLEMENTATIONS:
        with kernels.using(name):
            made.add(codec.encode(base, new, dtype, kind))
    (delta,) = made
    for name in IMPLEMENTATIONS:
        with kernels.using(name):
            assert codec.apply(base, delta) == new
            target = bytearray(base)
            codec.apply_into(target, delta)
            assert bytes(target) == new


@pytest.mark.parametrize("kind", [None, Kind.DENSE])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_dtype_without_steps_is_taken_as_bytes(data: st.DataObject, kind: Kind | None) -> None:
    base, new = data.draw(versions("int8"))
    delta = codec.encode(base, new, "int8", kind)
    assert codec.apply(base, delta) == new
    assert codec.inspect(delta).dtype == "bytes"
    assert codec.inspect(delta).kind == Kind.DENSE


@pytest.mark.parametrize("dtype", STEPPED)
@pytest.mark.parametrize("kinds", [(Kind.RICE, Kind.BITMAP), (Kind.RICE, Kind.RICE)])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_composed_delta_equals_applying_both(data: st.DataObject, kinds: tuple[Kind, Kind], dtype: str) -> None:
    base, middle, new = data.draw(versions(dtype, 3))
    first, second = codec.encode(base, middle, dtype, kinds[0]), codec.encode(middle, new, dtype, kinds[1])
    made = set()
    for name in IMPLEMENTATIONS:
        with kernels.using(name):
            made.add(codec.compose(first, second))
    (composed,) = made
    assert codec.apply(base, composed) == new
    assert composed == codec.encode(base, new, dtype, codec.inspect(composed).kind)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), kinds=st.tuples(st.sampled_from(list(Kind)), st.sampled_from(list(Kind))))
def test_any_two_kinds_compose(data: st.DataObject, kinds: tuple[Kind, Kind]) -> None:
    base, middle, new = data.draw(versions("bfloat16", 3))
    first, second = (
        codec.encode(a, b, "bfloat16", k) for (a, b), k in zip(pairwise((base, middle, new)), kinds, strict=True)
    )
    assert codec.apply(base, codec.compose(first, second)) == new


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_composing_is_associative(data: st.DataObject) -> None:
    made = data.draw(versions("float16", 4))
    one, two, three = (codec.encode(a, b, "float16", Kind.RICE) for a, b in pairwise(made))
    left = codec.compose(codec.compose(one, two), three)
    assert left == codec.compose(one, codec.compose(two, three))
    assert codec.apply(made[0], left) == made[3]


@pytest.mark.parametrize("dtype", STEPPED)
@pytest.mark.parametrize("kind", [Kind.RICE, Kind.BITMAP])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_delta_and_the_one_back_compose_to_no_change(data: st.DataObject, kind: Kind, dtype: str) -> None:
    base, new = data.draw(versions(dtype))
    delta, back = codec.encode(base, new, dtype, kind), codec.encode(new, base, dtype, kind)
    assert codec.apply(new, back) == base
    assert codec.inspect(codec.compose(delta, back)).n_changed == 0


def test_minus_zero_and_nan_payloads_are_changes(implementation: str) -> None:
    base, new = bf16(0, MINUS_ZERO, 0x7FC0, 0x7F80, 1), bf16(MINUS_ZERO, 0, 0x7FC1, 0xFFFF, 0x8001)
    delta = codec.encode(base, new, "bfloat16", Kind.RICE)
    assert codec.inspect(delta).n_changed == 5
    assert codec.apply(base, delta) == new


@pytest.mark.parametrize(
    ("changed", "kind"),
    [(0.0, Kind.RICE), (0.01, Kind.RICE), (0.28, Kind.RICE), (0.5, Kind.BITMAP), (1.0, Kind.BITMAP)],
)
def test_the_kind_follows_from_the_density(changed: float, kind: Kind) -> None:
    base, new = weights(20_000, changed)
    assert codec.inspect(codec.encode(base, new, "bfloat16")).kind == kind


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_values_that_are_all_different_are_sent_as_they_are(dtype: str) -> None:
    rng = np.random.default_rng(1)
    base, new = rng.bytes(4096), rng.bytes(4096)
    delta = codec.encode(base, new, dtype)
    assert codec.inspect(delta).kind == Kind.DENSE
    assert len(delta) == HEADER.size + 4096
    assert codec.compose(codec.encode(base, new, dtype), delta) == delta


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("changed", [0.01, 0.05, 0.28, 0.5])
def test_whole_chunk_is_identical_from_every_implementation(changed: float, dtype: str) -> None:
    base, new = weights(200_002, changed)
    made = set()
    for name in IMPLEMENTATIONS:
        with kernels.using(name):
            made.add(codec.encode(base, new, dtype))
            assert codec.apply(base, next(iter(made))) == new
    assert len(made) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_delta_with_a_position_out_of_range_changes_nothing(dtype: str, implementation: str) -> None:
    base, new = weights(200_000, 0.05)
    info, payload = unseal(codec.encode(base, new, dtype, Kind.RICE))
    last = int(Sections(info, payload).positions(kernels.active())[-1])
    for n_values, inside in ((last, False), (last + 1, True)):
        target = bytearray(base[: n_values * info.width])
        delta = seal(info._replace(n_values=n_values), [payload])
        if inside:
            codec.apply_into(target, delta)
            assert target == new[: len(target)]
        else:
            with pytest.raises(CorruptDelta):
                codec.apply_into(target, delta)
            assert target == base[: len(target)]


@pytest.mark.parametrize("kind", list(Kind))
def test_buffers_may_begin_anywhere_in_memory(kind: Kind, implementation: str) -> None:
    base, new = weights(3001, 0.1)
    before, after = memoryview(b"x" + base)[1:], memoryview(b"yyy" + new)[3:]
    delta = codec.encode(before, after, "bfloat16", kind)
    target = memoryview(bytearray(b"z" + base))[1:]
    codec.apply_into(target, memoryview(b"?" + delta)[1:])
    assert bytes(target) == new


@pytest.mark.parametrize(("n", "m"), [(1, 1), (10, 1), (1000, 10), (1000, 50), (1000, 280), (1000, 999), (1 << 30, 1)])
def test_the_parameter_of_a_rice_code_is_the_shortest(n: int, m: int) -> None:
    k = rice_k(n, m)
    if m < n:
        assert rice_bits(n, m, k) <= min(rice_bits(n, m, other) for other in range(25)) + 1e-9


def test_the_parameter_of_magnitudes_follows_their_size() -> None:
    assert golomb_k(np.array([], dtype=np.uint32)) == 0
    assert golomb_k(np.full(10, 1 << 20, dtype=np.uint32)) > golomb_k(np.full(10, 3, dtype=np.uint32))


@pytest.mark.parametrize("k", [0, 3, 30])
@pytest.mark.parametrize(
    "magnitudes", [[255] * 8 + [0, 0], [0], [(1 << 31) - 2], [5, (1 << 31) - 2, 0, 1] * 50, [7] * 128]
)
def test_magnitudes_of_any_size_end_anywhere_in_a_word(magnitudes: list[int], k: int) -> None:
    numbers = np.array(magnitudes, dtype=np.uint32)
    made = set()
    for run in kernels.available().values():
        unary, fields = run.golomb_pack(numbers, k)
        made.add((unary.tobytes(), fields.tobytes()))
        guarded = np.concatenate([fields, np.zeros(8, dtype=np.uint8)])
        assert run.golomb_unpack(unary, guarded, len(fields), len(numbers), k, 4).tolist() == magnitudes
    assert len(made) == 1


@pytest.mark.parametrize(
    ("base", "new", "dtype", "kind", "text"),
    [
        (b"abcd", b"ab", "bfloat16", None, "the base has 4 bytes"),
        (b"abc", b"abc", "bfloat16", None, "not a whole number"),
        (b"abcd", b"abce", "int32", Kind.RICE, "no steps"),
    ],
)
def test_encode_refuses_invalid_arguments(base: bytes, new: bytes, dtype: str, kind: Kind | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        codec.encode(base, new, dtype, kind)


def test_deltas_of_different_tensors_do_not_compose() -> None:
    one = codec.encode(bytes(8), bytes(8), "bfloat16", Kind.RICE)
    for other in (codec.encode(bytes(6), bytes(6), "bfloat16"), codec.encode(bytes(8), bytes(8), "float16")):
        with pytest.raises(CorruptDelta, match="cannot follow"):
            codec.compose(one, other)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_delta_for_another_length_is_refused(kind: Kind, implementation: str) -> None:
    base, new = weights(100, 0.2)
    delta = codec.encode(base, new, "bfloat16", kind)
    for other in (b"", base[:-2], base + bytes(2)):
        with pytest.raises(CorruptDelta, match="for a base of 200 bytes"):
            codec.apply(other, delta)


def test_corrupt_delta_is_unprocessable() -> None:
    assert issubclass(CorruptDelta, Unprocessable)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_truncated_flipped_or_spliced_delta_is_accepted(kind: Kind) -> None:
    base, new = weights(150, 0.2)
    delta = codec.encode(base, new, "bfloat16", kind)
    other = codec.encode(new, base, "bfloat16", kind)
    damaged = [delta[:length] for length in range(0, len(delta), 7)]
    damaged += [delta + bytes(8), delta * 2, delta[: HEADER.size] + other[HEADER.size :]]
    damaged += [delta[:-24] + delta[-16:-8] + delta[-24:-16] + delta[-8:]] if delta[-16:-8] != delta[-24:-16] else []
    for bit in range(0, len(delta) * 8, 13):
        flipped = bytearray(delta)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        damaged.append(bytes(flipped))
    for bad in damaged:
        target = bytearray(base)
        with pytest.raises(CorruptDelta):
            codec.apply_into(target, bad)
        assert target == base


def outcome(name: str, base: bytes, delta: bytes) -> bytes | None:
    """Return the result, or None for a refusal that left the target as it was."""
    target = bytearray(base)
    with kernels.using(name):
        try:
            codec.apply_into(target, delta)
        except CorruptDelta:
            assert target == base
            return None
    assert len(target) == len(base)
    return bytes(target)


@pytest.mark.parametrize("kind", SPARSE)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_forged_delta_is_refused_or_read_alike_by_all_kernels(data: st.DataObject, kind: Kind) -> None:
    dtype = data.draw(st.sampled_from(STEPPED))
    n = 300
    base, new = weights(n * WIDTHS[dtype] // 2, data.draw(st.sampled_from([0.02, 0.3, 0.9])))
    info, payload = unseal(codec.encode(base, new, dtype, kind))
    made_up = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(made_up) - 1, 40)) | st.integers(0, len(made_up) - 1))
        made_up[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 255]))
    if data.draw(st.booleans()):
        info = info._replace(n_changed=data.draw(st.integers(0, n)))
    delta = seal(info, [bytes(made_up)])
    assert len({outcome(name, base, delta) for name in IMPLEMENTATIONS}) == 1
    with suppress(CorruptDelta, ValueError):
        assert codec.inspect(codec.compose(delta, delta)).n_values == n


HUGE = (1 << 32) - 8


@pytest.mark.parametrize(
    "params",
    [
        Params(k=25),
        Params(escape_k=25),
        Params(magnitude_k=31),
        Params(k=24, unary_bytes=HUGE),
        Params(unary_bytes=HUGE),
        Params(unary_bytes=7),
        Params(n_escapes=HUGE),
        Params(n_escapes=4, escape_unary_bytes=HUGE),
        Params(magnitude_unary_bytes=HUGE, magnitude_bytes=8),
        Params(magnitude_bytes=HUGE),
    ],
)
@pytest.mark.parametrize("kind", SPARSE)
def test_sizes_beyond_the_payload_are_refused_before_allocation(kind: Kind, params: Params) -> None:
    for n_changed in (0, 3, 64, MAX_VALUES):
        info = Info(kind, "bfloat16", MAX_VALUES, n_changed)
        delta = seal(info, [PARAMS.pack(*params), bytes(64), GUARD])
        with pytest.raises(CorruptDelta):
            codec.compose(delta, delta)
        with pytest.raises(CorruptDelta):
            Sections(info, memoryview(delta)[HEADER.size :])


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [(0, 0, "does not start"), (4, 9, "format version 9"), (5, 77, "kind 77"), (6, 9, "dtype 9"), (7, 1, "reserved")],
)
def test_foreign_delta_header_is_refused_with_the_reason(at: int, value: int, text: str) -> None:
    delta = bytearray(codec.encode(bytes(8), bytes(8), "bfloat16"))
    delta[at] = value
    with pytest.raises(CorruptDelta, match=text):
        codec.inspect(delta)


@pytest.mark.parametrize(
    "info",
    [
        Info(Kind.RICE, "bytes", 4, 1),
        Info(Kind.BITMAP, "bytes", 4, 1),
        Info(Kind.RICE, "bfloat16", 4, 5),
        Info(Kind.DENSE, "float32", MAX_VALUES + 1, MAX_VALUES + 1),
        Info(Kind.DENSE, "bfloat16", 4, 3),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(info: Info) -> None:
    with pytest.raises(CorruptDelta):
        codec.apply(bytes(8), seal(info, [bytes(8)]))


GOLDEN_NAMES = [
    *(f"{kind.name.lower()}-{dtype}" for kind in Kind for dtype in STEPPED),
    "dense-bytes",
]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_golden_file_decodes_to_the_known_values(name: str, implementation: str) -> None:
    before, after, dtype, kind = golden_case(name)
    file = GOLDEN / f"{name}.delta"
    if os.environ.get("RLBOOST_WRITE_GOLDEN") == "1":
        file.write_bytes(codec.encode(before.tobytes(), after.tobytes(), dtype, kind))
    assert file.exists(), f"a new kind needs a golden file: RLBOOST_WRITE_GOLDEN=1 pytest {__file__}"
    delta = file.read_bytes()
    assert codec.inspect(delta)[:3] == (kind, dtype, 1000)
    assert codec.apply(before.tobytes(), delta) == after.tobytes()
    assert codec.encode(before.tobytes(), after.tobytes(), dtype, kind) == delta


def test_golden_files_are_those_of_the_current_kinds() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(GOLDEN_NAMES)
