"""Faults of many kinds against a local system that always trains; every job must get each sample exactly once.

    make chaos ARGS="--minutes 10 --seed 1"

Starts `rlboost up` with a standby manager in a temporary folder, and a worker in a network of its own. Faults:

- `kill`, `terminate`, `stop`: SIGKILL, SIGTERM, or SIGSTOP for 1 to 60 s, of any process
- `step_clock`: the wall clock of any process is 10 s to 10 minutes ahead or behind for 1 to 60 s (needs a C compiler)
- `disconnect`: all connections of Redis are closed; `out_of_memory`: its `maxmemory` is below what it uses for seconds
- `disk_full`: the disk of the state folder is full for seconds (needs the right to mount a tmpfs)
- `partition`: the network of the remote worker passes nothing for seconds (needs user namespaces)
- `flip_bytes`: a byte of a chunk in the weight store changes
- `kill_all`: all processes get SIGKILL at once, and `rlboost up` starts again
- `hold`: a client with a join token claims 100,000 slots, takes samples and sends nothing; `undead`: it then dies, with
  a lease that does not expire; `drip`: a weight peer sends a byte a second, and another worker pulls meanwhile
- `kill_trainer`: a job whose loss ends the trainer's process is queued; it must fail

A fault that this machine does not permit is named and left out. Prints a table of faults and recoveries and exits with
1 if another job fails, or if its audit and an independent reader of Redis disagree or find a lost or a repeated sample.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import get_args

from benchmarks.chaos.run import Played, Run
from benchmarks.chaos.schedule import Kind, plan
from benchmarks.chaos.site import Site
from tests.support.small_job import samples_of


def table(played: list[Played]) -> str:
    """Return a row per kind: how many faults, and the seconds to the next delivered sample."""
    lines = ["| fault | times | not possible | recovery: median | longest |", "|---|---|---|---|---|"]
    for kind in sorted({one.fault.kind for one in played}):
        of_kind = [one for one in played if one.fault.kind == kind]
        times = [one.recovered_s for one in of_kind if one.recovered_s is not None]
        shown = f"{median(times):.1f} s | {max(times):.1f} s" if times else "- | -"
        refused = sum(bool(one.not_possible) for one in of_kind)
        lines.append(f"| {kind} | {len(of_kind) - refused} | {refused} | {shown} |")
    return "\n".join(lines)


def run(minutes: float, seed: int, kinds: set[Kind], *, every_s: float, steps: int, workers: int) -> dict[str, int]:
    """Play one run; return its result. Raises `AssertionError` where a guarantee does not hold."""
    allowed = set(kinds)
    with tempfile.TemporaryDirectory() as directory, Site(Path(directory), workers=workers, kinds=allowed) as site:
        for kind, why in site.skipped.items():
            print(f"skipped: {kind}: {why}", flush=True)
        playing = Run(site, plan(seed, minutes * 60, allowed, every_s=every_s), minutes * 60, steps)
        try:
            playing.run()
        finally:
            print(table(playing.played), flush=True)
    audits = [job.audit for job in playing.jobs if job.audit]
    return {
        "seed": seed,
        "faults": sum(not played.not_possible for played in playing.played),
        "restarts": site.restarts,
        "jobs": len(audits),
        "requested": sum(samples_of(job.spec) for job in playing.jobs),
        "delivered": sum(audit["delivered"] for audit in audits),
        "tokens_generated": sum(audit["tokens_generated"] for audit in audits),
        "tokens_regenerated": sum(sum(audit["tokens_regenerated"].values()) for audit in audits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between faults")
    parser.add_argument("--steps", type=int, default=60, help="of each job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    args = parser.parse_args()
    try:
        result = run(
            args.minutes, args.seed, set(args.kinds), every_s=args.every, steps=args.steps, workers=args.workers
        )
    except AssertionError as error:
        print(f"a guarantee does not hold (seed {args.seed}): {error}", file=sys.stderr)
        return 1
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
