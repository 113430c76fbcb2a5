"""The trainer's overhead over a plain loop of transformers and AdamW, and a job compared with TRL's GRPOTrainer.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer [--rounds 9] [--end-to-end 2] [--steps 6]
    OMP_NUM_THREADS=1 python -m benchmarks.trainer --rounds 0 --end-to-end 0 --compile 5 --nodes 3    # nodes: as root
    python -m benchmarks.trainer --device cuda --dtype bfloat16 --end-to-end 0

One JSON line a comparison. *Updates*: both train on the same rows, in turn, in one process; ours packs them, the loop
sorts them by length and pads them. Tokens a second count prompts and completions, by processor time, on a GPU by the
clock; `mfu` is 6 x parameters x tokens a second over what a product of two square matrices reaches in the same process
and dtype. *End to end*: the Countdown job by TRL, by our engine and trainer in one process, and by a whole system with
all its services. *Compile*: updates with `trainer.compile` against updates without. *Nodes*: the same updates by two
ranks on each of two nodes, which are network namespaces with gloo; `cpu_efficiency` is the processor time of one
process over that of all ranks and the trainer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.trainer import end_to_end, nodes, work
from benchmarks.trainer.updates import Bare, Ours, cut_by_length, n_padded

SIDES = {"cpu": 1024, "cuda": 8192}
"""Sides of the multiplied matrices, by device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of the updates; 0 leaves them out")
    parser.add_argument("--end-to-end", type=int, default=2, help="rounds; 0 leaves it out")
    parser.add_argument("--compile", type=int, default=0, help="rounds of updates with trainer.compile; 0: none")
    parser.add_argument("--nodes", type=int, default=0, help="rounds of updates on two nodes; 0 leaves them out")
    parser.add_argument("--steps", type=int, default=6, help="of a job, end to end")
    parser.add_argument("--device", choices=sorted(SIDES), default="cpu", help="of the updates")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of their matrix products")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    for case in work.cases(args.device) if args.rounds else ():
        print(json.dumps(compare(case, args.rounds, args.device, args.dtype)), flush=True)
    for case in work.cases(args.device) if args.compile else ():
        print(json.dumps(compare_compiled(case, args.compile, args.device, args.dtype)), flush=True)
    if args.nodes:
        for row in nodes.compare(work.cases("cpu")[-1], args.nodes):
            print(json.dumps(row), flush=True)
    if args.end_to_end:
        print(json.dumps(end_to_end.rounds(args.end_to_end, args.steps)), flush=True)


def compare(case: work.Case, rounds: int, device: str, dtype: str) -> dict[str, Any]:
    """Return one case's figures; ratios are medians of the rounds' own."""
    groups = work.groups(case)
    batches = cut_by_length(groups, case.micro_batch_tokens)
    tokens = sum(row.n_tokens for group in groups for row in group)
    with tempfile.TemporaryDirectory() as folder:
        model = work.write_model(case, Path(folder))
        ours, bare = Ours(model, groups, case.micro_batch_tokens, device, dtype), Bare(model, batches, device, dtype)
    norms = ours.update(), bare.update()
    rounding = 1e-3 if dtype == "float32" else 2e-2
    assert abs(norms[0] - norms[1]) < rounding * norms[1], f"not the same work: the gradients' norms are {norms}"
    n_parameters = bare.n_parameters
    times: dict[str, list[float]] = {"ours": [], "bare": [], "product": []}
    side = SIDES[device]
    left = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
    timed = _timed_on_gpu if device == "cuda" else _timed
    for number in range(rounds):
        turns = [("ours", ours.update), ("bare", bare.update)]
        for name, call in (*turns[:: -1 if number % 2 else 1], ("product", lambda: left @ left)):
            times[name].append(timed(call))
    peak = 2 * side**3 / min(times["product"])
    per_s = {name: tokens / median(times[name]) for name in ("ours", "bare")}
    return {
        "benchmark": "trainer.updates",
        "case": case.name,
        "device": device,
        "dtype": dtype,
        "parameters": n_parameters,
        "tokens": tokens,
        "bare_computed_tokens_over_tokens": round(sum(map(n_padded, batches)) / tokens, 3),
        "tokens_per_s": {name: round(value) for name, value in per_s.items()},
        "mfu": {name: round(6 * n_parameters * value / peak, 3) for name, value in per_s.items()},
        "ours_over_bare": round(median(b / a for a, b in zip(times["ours"], times["bare"], strict=True)), 3),
    }


def compare_compiled(case: work.Case, rounds: int, device: str, dtype: str) -> dict[str, Any]:
    """Return the effect of `trainer.compile` on one case's updates: medians, and the first update, which compiles."""
    groups = work.groups(case)
    with tempfile.TemporaryDirectory() as folder:
        model = work.write_model(case, Path(folder))
        plain, compiled = (
            Ours(model, groups, case.micro_batch_tokens, device, dtype, compiled=value) for value in (False, True)
        )
    timed = _timed_on_gpu if device == "cuda" else _timed
    timed(plain.update)
    first_s = timed(compiled.update)
    times = [(timed(plain.update), timed(compiled.update)) for _ in range(rounds)]
    return {
        "benchmark": "trainer.compile",
        "case": case.name,
        "device": device,
        "dtype": dtype,
        "rounds": rounds,
        "first_update_s": round(first_s, 1),
        "update_s": [round(median(column), 3) for column in zip(*times, strict=True)],
        "plain_over_compiled": round(median(a / b for a, b in times), 3),
    }


def _timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _timed_on_gpu(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
