"""Seconds per step of a job whose trainer and engine share one GPU, and from an engine's start to its first token.

    python -m benchmarks.gpu.colocated [--gpus 0] [--engine vllm] [--steps 4]

Runs the Countdown job in a whole system: trainer and one reserved worker on the same device, no spot worker. Run it
twice for a warm start: the second one finds vLLM's compilation cache. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rlboost.client import Client
from rlboost.jobs.file import complete
from rlboost.local.cluster import LocalCluster
from rlboost.local.spec_file import SystemSpec, local_options
from rlboost.shared.job.file import load
from rlboost.shared.messages import ENDED

_JOB = "examples/countdown/job.yaml"
_POLL_INTERVAL_S = 1.0
_LIMIT_S = 420.0
_TIMES = ("time/step_s", "time/seeding_s", "time/wait_s", "time/train_s", "time/publish_s")


async def measure(spec: SystemSpec, overrides: list[str]) -> dict[str, Any]:
    """Return the medians of a job's steps, without the first one, and the engine's start by phase."""
    job = complete(load(_JOB, overrides))
    with tempfile.TemporaryDirectory(prefix="rlboost-bench-") as folder:
        options = local_options(spec, Path(folder))
        async with LocalCluster(options) as cluster, asyncio.timeout(_LIMIT_S):
            with Client(cluster.url, cluster.token) as client:
                job_id = client.jobs.create(job)["id"]
                shown = await _ended(client, job_id)
                if shown["state"] != "completed":
                    raise SystemExit(f"the job {shown['state']}: {shown['error']}")
                rows = client.jobs.metrics(job_id)[1:]
        log = options.state_dir / "logs" / "reserved-1.log"
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    start = next(line for line in lines if line["event"] == "first_token")
    return {
        **{name: round(median(row[name] for row in rows), 3) for name in _TIMES},
        "tokens_per_s": round(median(row["perf/tokens_per_s"] for row in rows)),
        "first_token": {name: value for name, value in start.items() if name.endswith("_s")},
    }


async def _ended(client: Client, job_id: str) -> dict[str, Any]:
    while True:
        shown: dict[str, Any] = await asyncio.to_thread(client.jobs.show, job_id)
        if shown["state"] in ENDED:
            return shown
        await asyncio.sleep(_POLL_INTERVAL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="of trainer and engine; empty: on the CPU")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="vllm")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    overrides = [f"steps={args.steps}"]
    if args.gpus:
        overrides += ["trainer.dtype=bfloat16", "trainer.offload=all"]
    spec = SystemSpec(gpus=args.gpus, engine=args.engine, reserved=1, workers=0)
    print(json.dumps(asyncio.run(measure(spec, overrides))), flush=True)


if __name__ == "__main__":
    main()
