"""How many answers a second math-verify checks through the reward processes.

    OMP_NUM_THREADS=1 python -m benchmarks.rewards [--workers 2] [--groups 200] [--group-size 8]

The whole path of a job: `rlboost.rewards.math:score` in as many processes as `reward.workers` says, one group at a time
in each. No answer occurs in two groups, so that nothing is remembered between them; half of the answers are right, and
each has its own text around it. The processes are warm: the parser's first expressions of each kind take it many times
longer. One line a kind of answer, then all kinds mixed: with wrong answers that are all different, and with the same
wrong answer all over a group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence

from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.ports import RewardBatch
from shared.reward import RewardSpec
from shared.waiting import Waits

FUNCTION = "rlboost.rewards.math:score"
REASONING = "We write the sum as a product, collect what is alike and divide both sides by what is left. "
WARM = 1_000_000
KINDS: dict[str, Callable[[int], str]] = {
    "integers": str,
    "fractions": lambda n: f"\\frac{{{n}}}{{{n + 1}}}",
    "roots": lambda n: f"{n}\\sqrt{{3}}",
    "polynomials": lambda n: f"x^2 + {n}x - {n + 2}",
}


def group(kind: str, n: int, size: int, *, differ: bool) -> RewardBatch:
    """Return one problem with `size` completions of about 100 words, every second one right."""
    first = n * (size + 1)
    truth = KINDS[kind](first)
    answers = [truth if i % 2 else KINDS[kind](first + 1 + differ * i) for i in range(size)]
    texts = [f"Attempt {i}. {REASONING * 5}The answer is \\boxed{{{answer}}}.<eos>" for i, answer in enumerate(answers)]
    return RewardBatch(["?"] * size, list(texts), [[1]] * size, {"answer": [truth] * size})


async def measure(groups: Sequence[RewardBatch], workers: int) -> float:
    """Return the seconds that all groups took."""
    pool = RewardPool(RewardSpec(function=FUNCTION, workers=workers, timeout_s=60), Waits())
    await pool.start()
    try:
        warming = [group(kind, WARM + n, 4, differ=True) for kind in KINDS for n in range(4 * workers)]
        await asyncio.gather(*map(pool.score, warming))
        began = time.perf_counter()
        scores = await asyncio.gather(*map(pool.score, groups))
        took_s = time.perf_counter() - began
    finally:
        await pool.close()
    for batch, scored in zip(groups, scores, strict=True):
        assert scored.rewards == tuple(float(i % 2) for i in range(len(batch.completions))), scored
    return took_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    for kind in (*KINDS, "mixed"):
        for differ in (True, False):
            names = list(KINDS) if kind == "mixed" else [kind]
            problems = range(1, asked.groups + 1)
            groups = [group(names[n % len(names)], n, asked.group_size, differ=differ) for n in problems]
            took_s = await measure(groups, asked.workers)
            row = {
                "answers": kind,
                "wrong_ones_differ": differ,
                "workers": asked.workers,
                "checks_per_s": round(asked.groups * asked.group_size / took_s),
                "cores": os.cpu_count(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
