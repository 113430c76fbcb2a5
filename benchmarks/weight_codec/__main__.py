"""The weight codec, compared with a memory copy and with the formats of other systems, on one core.

Prints JSON lines and a table.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_codec [--chunks 4] [--rounds 15] [--no-models]

Two versions of bfloat16 weights are cut into chunks of 4 MiB. Every codec encodes each chunk, differences included, and
applies the result in place, in turn with the others. Of each chunk the best round counts, in seconds of processor time,
and the chunks' are added up: what else the machine does disturbs short measurements least. The memory copy is numpy's,
of the same chunks, in the same rounds. Every result is compared bit for bit. `again` is a second application at once,
to what the first has left in the caches.

Weights:

- `synthetic`: 32-bit weights drawn from N(0, 0.02) under Adam (betas 0.9 and 0.999) whose gradients are drawn from
  N(0, 1) anew in each of 20 steps, at the learning rates that `SYNTHETIC` names. The versions are the weights before
  and after the last step, rounded to bfloat16. At 1e-6 about 1 % change.
- `countdown`: the example's base model under AdamW at 1e-6 on its own training prompts, before and after step 12.
- `qwen3-43M`: a Qwen3 of 43 M parameters, initialized at random, under AdamW at 1e-6 on random tokens, before and
  after step 4 (a second pair: step 2 and step 5).

`contenders.py` describes the other codecs and which are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.weight_codec.contenders import Codec, Weights, contenders
from benchmarks.weight_codec.weights import VALUES, pairs


def measured(label: str, base: Weights, new: Weights, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each codec."""
    codecs, copy_s = contenders(), dict[int, float]()
    for round_no in range(rounds):
        for chunk, at in enumerate(range(0, len(base), VALUES)):
            before, after = base[at : at + VALUES], new[at : at + VALUES]
            target = before.copy()
            np.copyto(target, after)
            _keep_best(copy_s, chunk, _seconds(partial(np.copyto, target, before)))
            for one in codecs:
                if one.rounds is None or round_no < one.rounds:
                    _turn(one, chunk, before, after, target)
    changed = int((base != new).sum())
    return [_row(label, one, len(base), changed, sum(copy_s.values())) for one in codecs]


def _turn(one: Codec, chunk: int, base: Weights, new: Weights, target: Weights) -> None:
    """Let one codec have its turn at one chunk."""
    deltas: list[Any] = []
    # Every codec starts with the same cache state: both versions were just read.
    np.copyto(target, base)
    np.copyto(target, new)
    with one.using():
        _keep_best(one.encode_s, chunk, _seconds(lambda: deltas.append(one.encode(base, new))))
        np.copyto(target, base)
        _keep_best(one.apply_s, chunk, _seconds(lambda: one.apply(target, deltas[0])))
    if not np.array_equal(target, new):
        raise SystemExit(f"{one.name} is not exact")
    with one.using():
        _keep_best(one.apply_again_s, chunk, _seconds(lambda: one.apply(target, deltas[0])))
    one.sizes[chunk] = one.size(deltas[0])


def _keep_best(best: dict[int, float], chunk: int, seconds: float) -> None:
    best[chunk] = min(seconds, best.get(chunk, seconds))


def _row(label: str, one: Codec, n: int, changed: int, copy_s: float) -> dict[str, Any]:
    gb, encode_s = n * 2 / 1e9, sum(one.encode_s.values())
    return {
        "weights": label,
        "codec": one.name,
        "values": n,
        "changed": round(changed / n, 4),
        "bytes_per_changed": round(sum(one.sizes.values()) / changed, 3),
        "copy_gb_per_s": round(gb / copy_s, 2),
        "encode_gb_per_s": round(gb / encode_s, 2),
        "encode_of_copy": round(copy_s / encode_s, 3),
        "apply_m_values_per_s": round(changed / sum(one.apply_s.values()) / 1e6, 1),
        "apply_again_m_values_per_s": round(changed / sum(one.apply_again_s.values()) / 1e6, 1),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4, help="of 4 MiB, of synthetic weights")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-models", action="store_true", help="do not train models")
    args = parser.parse_args()
    table = Table(
        "weights", "changed", "codec", "bytes a change", "encode GB/s", "of a copy", "apply M values/s", "again"
    )
    for label, base, new in pairs(args.chunks, not args.no_models):
        # A model has many chunks: where each has fewer rounds, their sum is as steady.
        rounds = args.rounds if label.startswith("synthetic") else max(2, args.rounds // 3)
        for row in measured(label, base, new, rounds):
            print(json.dumps(row), flush=True)
            table.add_row(
                label,
                f"{row['changed']:.2%}",
                row["codec"],
                f"{row['bytes_per_changed']:.3f}",
                f"{row['encode_gb_per_s']:.2f}",
                f"{row['encode_of_copy']:.2f}",
                f"{row['apply_m_values_per_s']:.1f}",
                f"{row['apply_again_m_values_per_s']:.1f}",
            )
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
