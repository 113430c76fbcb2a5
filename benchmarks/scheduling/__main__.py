"""Step time, idleness and waste of scheduling policies in simulated steps; ours is the manager's own domain code.

    python -m benchmarks.scheduling [--cases kv32b] [--preemptions 0 2 6] [--policies ours paper] [--seeds 2] [--quick]

One JSON line a run, then a table with means over the seeds and a last JSON line with geometric means of the ratios. A
ratio is one of throughputs: `ours/paper` 1.1 means that ours does ten per cent more steps in the same time. All
policies of a run meet the same lengths and the same comings and goings.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable

from rich.console import Console

from benchmarks.scheduling.cases import CASES
from benchmarks.scheduling.measure import POLICIES, Result, bound, prepare, run
from benchmarks.scheduling.table import summary, table

QUICK_PARTS = 8
QUICK_STEPS = 3


def results(args: argparse.Namespace) -> Iterable[Result]:
    """Yield the figures of every run."""
    for name in args.cases:
        case = CASES[name]
        case = case.smaller(QUICK_PARTS, QUICK_STEPS) if args.quick else case
        for preemptions in args.preemptions:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                work = prepare(case, preemptions, seed)
                yield bound(work, preemptions, seed)
                for policy in args.policies:
                    yield run(work, policy, preemptions, seed)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--preemptions", nargs="+", type=int, help="how many go in a run; 0 2 6, or 0 6 with --quick")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--first-seed", type=int, default=1, help="0 is the one on which things were tuned")
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples, three steps, one seed")
    args = parser.parse_args()
    args.preemptions = args.preemptions or ([0, 6] if args.quick else [0, 2, 6])
    args.seeds = 1 if args.quick else args.seeds
    began = time.process_time()
    found = []
    for result in results(args):
        print(json.dumps(result.public()), flush=True)
        found.append(result)
    # The table is for people: it is as wide as it has to be where nobody's terminal limits it.
    Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    print(json.dumps(summary(found) | {"cpu_s": round(time.process_time() - began, 1)}))


if __name__ == "__main__":
    main()
