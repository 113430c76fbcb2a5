"""What `trainer.deterministic` changes in the torch engine: the bits of samples, and the processor time of generating.

    OMP_NUM_THREADS=1 python -m benchmarks.determinism [--model examples/countdown/base] [--rounds 5]

Groups of eight samples of examples/countdown. Two tables, without `batch_invariant` and with it:

1. Log-probabilities and samples that differ if one group is generated at a time instead of all at once, and if all
   resume on another engine after half of their tokens.
2. The ratio of processor time, with to without, for batches of different sizes. Both take turns; a figure is the median
   of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.speculation import EXAMPLE, SIBLINGS, Groups, Samples, generate, start
from rlboost.services.rollout_worker.domain.requests import Request

GROUPS = 12
BATCHES = (1, 4, 12)
"""Groups at once."""


def invariant(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the option."""
    return [replace(one, sampling=one.sampling.model_copy(update={"batch_invariant": True})) for one in requests]


async def differences(model: Path, groups: Sequence[Sequence[Request]]) -> str:
    """Return the first table's row."""
    everything = [request for group in groups for request in group]
    whole = await _fresh(model, everything)
    by_group: Samples = {}
    for group in groups:
        by_group |= await _fresh(model, group)
    halves = {sample: len(made.tokens) // 2 for sample, made in whole.items()}
    resumed = await _fresh(
        model, [replace(one, tokens=whole[one.sample].tokens[: halves[one.sample]]) for one in everything]
    )
    rest = {
        sample: replace(made, tokens=made.tokens[halves[sample] :], logprobs=made.logprobs[halves[sample] :])
        for sample, made in whole.items()
    }
    return f"{_differ(whole, by_group)} | {_differ(rest, resumed)}"


async def _fresh(model: Path, requests: Sequence[Request]) -> Samples:
    engine = await start(model, "float32")
    try:
        return await generate(engine, requests)
    finally:
        await engine.close()


def _differ(one: Samples, other: Samples) -> str:
    """Return how many log-probabilities differ of those with the same tokens before, and how many samples' tokens."""
    bits = n = samples = 0
    for sample, made in one.items():
        again = other[sample]
        samples += made.tokens != again.tokens
        for token, its, token_again, others in zip(
            made.tokens, made.logprobs, again.tokens, again.logprobs, strict=False
        ):
            if token != token_again:
                break
            n += 1
            bits += its != others
    return f"{bits} of {n} | {samples} of {len(one)}"


async def ratio(model: Path, requests: Sequence[Request], rounds: int) -> float:
    """Return the processor time with the option, divided by that without it."""
    engine = await start(model, "float32")
    ratios = []
    for number in range(rounds):
        times: list[float] = []
        for some in (requests, invariant(requests)):
            began = time.process_time()
            await generate(engine, [replace(one, attempt=2 * number + len(times)) for one in some])
            times.append(time.process_time() - began)
        ratios.append(times[1] / times[0])
    await engine.close()
    return median(ratios)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "base")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    groups = Groups(args.model, GROUPS).groups
    print(
        "| | other batch: log-probabilities | samples | resumed: log-probabilities | samples |\n|---|---|---|---|---|"
    )
    print(f"| default | {await differences(args.model, groups)} |")
    print(f"| deterministic | {await differences(args.model, [invariant(group) for group in groups])} |")
    print("\n| samples at once | processor time |\n|---|---|")
    for n in BATCHES:
        requests = [request for group in groups[:n] for request in group]
        print(f"| {n * SIBLINGS} | {await ratio(args.model, requests, args.rounds):.1f} times |")


if __name__ == "__main__":
    asyncio.run(main())
