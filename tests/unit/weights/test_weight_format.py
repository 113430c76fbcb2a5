"""An independent reader of weight deltas, written from `docs/weights-format.md` alone: the page is complete."""

from __future__ import annotations

import pytest
from blake3 import blake3

from tests.support.golden_deltas import GOLDEN, golden_case

WIDTHS = {"bfloat16": 16, "float16": 16, "float32": 32}


class BitReader:
    def __init__(self, data: bytes) -> None:
        self.number, self.at, self.end = int.from_bytes(data, "little"), 0, len(data) * 8

    def field(self, bits: int) -> int:
        value = (self.number >> self.at) & ((1 << bits) - 1)
        self.at += bits
        return value

    def unary(self) -> int:
        zeros = 0
        while not self.field(1):
            zeros += 1
            assert self.at < self.end
        return zeros


def words(bits: int) -> int:
    return 8 * -(-bits // 64)


def u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def places(low: BitReader, high: BitReader, count: int, k: int) -> list[int]:
    found, after = list[int](), 0
    for _ in range(count):
        found.append(after + low.field(k) + (high.unary() << k))
        after = found[-1] + 1
    return found


def read_rice(payload: bytes, m: int) -> list[tuple[int, int]]:
    """Return positions and steps."""
    k, ek, mk, e = payload[0], payload[1], payload[2], u32(payload, 8)
    sizes = [words(m * k), u32(payload, 4), words(m), words(e * ek), *(u32(payload, at) for at in (12, 16, 20))]
    readers, at = list[BitReader](), 24
    for size in sizes:
        readers.append(BitReader(payload[at : at + size]))
        at += size
    assert payload[at:] == bytes(8)
    low, high, signs, escapes_low, escapes_high, lengths, magnitudes = readers
    positions = places(low, high, m, k)
    steps = [-1 if signs.field(1) else 1 for _ in range(m)]
    for index in places(escapes_low, escapes_high, e, ek):
        bits = lengths.unary() + mk
        steps[index] *= (1 << bits) + magnitudes.field(bits) - (1 << mk) + 2
    return list(zip(positions, steps, strict=True))


def stepped(pattern: int, step: int, bits: int) -> int:
    top, every = 1 << (bits - 1), (1 << bits) - 1
    ordered = ~pattern & every if pattern & top else pattern | top
    moved = (ordered + step) & every
    return moved & ~top if moved & top else ~moved & every


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_the_page_is_enough_to_read_a_delta(dtype: str) -> None:
    before, after, _, _ = golden_case(f"rice-{dtype}")
    delta = (GOLDEN / f"rice-{dtype}.delta").read_bytes()
    header, payload, values = delta[:16], delta[24:], before.tolist()
    assert header[:5] == b"RBWD\x02"
    assert header[5:8] == bytes([1, ["bfloat16", "float16", "float32"].index(dtype) + 1, 0])
    assert delta[16:24] == blake3(header + payload).digest()[:8]
    n, m = u32(header, 8), u32(header, 12)
    assert n == len(values)
    changes = read_rice(payload, m)
    assert len(changes) == m
    for position, step in changes:
        values[position] = stepped(values[position], step, WIDTHS[dtype])
    assert values == after.tolist()
