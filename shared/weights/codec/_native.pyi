"""Types of the C extension `_native.c`. Arguments are contiguous arrays; the last ones are outputs."""

from typing import Any

from numpy.typing import NDArray

def diff(base: NDArray[Any], new: NDArray[Any], width: int, positions: NDArray[Any], steps: NDArray[Any], /) -> int: ...
def add(target: NDArray[Any], positions: NDArray[Any], steps: NDArray[Any], width: int, /) -> int: ...
def add_payload(
    target: NDArray[Any],
    payload: memoryview,
    count: int,
    width: int,
    k: int,
    escape_k: int,
    magnitude_k: int,
    unary_bytes: int,
    n_escapes: int,
    escape_unary_bytes: int,
    magnitude_unary_bytes: int,
    magnitude_bytes: int,
    /,
) -> int | None: ...
def add_bitmap(
    target: NDArray[Any], bitmap: NDArray[Any], steps: NDArray[Any], count: int, width: int, /
) -> int | None: ...
def rice_pack(positions: NDArray[Any], k: int, low: NDArray[Any], unary: NDArray[Any], /) -> int: ...
def rice_unpack(
    low: NDArray[Any], unary: NDArray[Any], count: int, k: int, n: int, positions: NDArray[Any], /
) -> int | None: ...
def rice1_bitmap(low: NDArray[Any], unary: NDArray[Any], count: int, n: int, bitmap: NDArray[Any], /) -> int | None: ...
def bitmap_pack(positions: NDArray[Any], bitmap: NDArray[Any], /) -> int: ...
def bitmap_unpack(bitmap: NDArray[Any], count: int, n: int, positions: NDArray[Any], /) -> int | None: ...
def split(
    steps: NDArray[Any], width: int, signs: NDArray[Any], escapes: NDArray[Any], magnitudes: NDArray[Any], /
) -> int: ...
def join(
    signs: NDArray[Any], escapes: NDArray[Any], magnitudes: NDArray[Any], width: int, steps: NDArray[Any], /
) -> int: ...
def golomb_pack(magnitudes: NDArray[Any], k: int, unary: NDArray[Any], fields: NDArray[Any], /) -> tuple[int, int]: ...
def golomb_unpack(
    unary: NDArray[Any],
    fields: NDArray[Any],
    fields_bytes: int,
    count: int,
    k: int,
    width: int,
    magnitudes: NDArray[Any],
    /,
) -> int | None: ...
def merge(
    first: NDArray[Any],
    first_steps: NDArray[Any],
    second: NDArray[Any],
    second_steps: NDArray[Any],
    width: int,
    positions: NDArray[Any],
    steps: NDArray[Any],
    /,
) -> int: ...
def best_level() -> int: ...
def use_level(level: int, /) -> None: ...
