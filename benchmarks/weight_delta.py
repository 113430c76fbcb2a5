"""Size and speed of weight deltas, compared with a memory copy of the same chunks in the same run, on one core.

Prints JSON lines and a table.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_delta [--chunks 4] [--rounds 15]

The weights are drawn from N(0, 0.02), in 32 bits, under Adam (betas 0.9 and 0.999) whose gradients are drawn from
N(0, 1) anew in each of 20 steps, at three learning rates. The versions are the weights before and after the last step,
rounded to bfloat16: about 1, 5 and 28 % change. Each chunk of 4 MiB is copied, encoded and applied in turn. Of each
chunk the best round counts, in seconds of processor time, and the chunks' are added up. Every result is compared bit
for bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from rlboost.shared.weights.delta import apply_delta, encode_delta
from rlboost.shared.weights.manifest import CHUNK_BYTES

LEARNING_RATES = (1e-6, 6.3e-6, 6.4e-5)
VALUES = CHUNK_BYTES // 2
Weights = NDArray[np.uint16]
T = TypeVar("T")


def versions(rate: float, n: int) -> tuple[Weights, Weights]:
    """Return bfloat16 patterns before and after the last of 20 steps of Adam."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, n).astype(np.float32)
    mean, square = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
    before = weights
    for step in range(1, 21):
        gradient = rng.standard_normal(n, dtype=np.float32)
        mean += np.float32(0.1) * (gradient - mean)
        square += np.float32(0.001) * (gradient * gradient - square)
        update = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        before, weights = weights, (weights - rate * update).astype(np.float32)
    return rounded(before), rounded(weights)


def rounded(values: NDArray[np.float32]) -> Weights:
    """Return bfloat16 patterns, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measured(rate: float, chunks: int, rounds: int) -> dict[str, Any]:
    """Return sizes, and speeds from the best round of each chunk."""
    base, new = versions(rate, chunks * VALUES)
    starts = range(0, len(base), VALUES)
    turns = [[turn(base[at : at + VALUES], new[at : at + VALUES]) for at in starts] for _ in range(rounds)]
    copy_s, encode_s, apply_s, n_bytes = np.min(turns, axis=0).sum(axis=0)
    changed = int((base != new).sum())
    return {
        "learning_rate": rate,
        "changed": round(changed / len(base), 4),
        "bytes_per_change": round(n_bytes / changed, 3),
        "of_the_weights": round(n_bytes / base.nbytes, 4),
        "encode_of_copy": round(copy_s / encode_s, 3),
        "apply_of_copy": round(copy_s / apply_s, 3),
        "apply_m_values_per_s": round(changed / apply_s / 1e6, 1),
        "copy_gb_per_s": round(base.nbytes / copy_s / 1e9, 2),
    }


def turn(base: Weights, new: Weights) -> tuple[float, float, float, int]:
    """Return the seconds to copy, encode and apply one chunk, and the bytes of the delta."""
    target = new.copy()
    copy_s, _ = timed(lambda: np.copyto(target, base))
    encode_s, delta = timed(lambda: encode_delta(base.data, new.data, "bfloat16"))
    apply_s, _ = timed(lambda: apply_delta(target.data, delta))
    if not np.array_equal(target, new):
        raise SystemExit("the delta is not exact")
    return copy_s, encode_s, apply_s, len(delta)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4, help="of 4 MiB")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = [measured(rate, args.chunks, args.rounds) for rate in LEARNING_RATES]
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        print(json.dumps(row), flush=True)
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
