"""How many answers per second math-verify checks through the reward processes, and what a check costs.

    OMP_NUM_THREADS=1 python -m benchmarks.rewards [--workers 2] [--groups 100] [--group-size 8]

The whole path of a job: `rlboost.rewards.math:score` in `reward.workers` processes, one group at a time in each. A
group has one problem; half of its completions are right, a quarter of these in another spelling. `wrong`: `some_agree`,
where half of the wrong completions give one answer, as in sampled groups; or `all_differ`. Each completion has 100 to
300 words of reasoning with formulas before the answer. No answer occurs in two groups. The processes are warm.

`cpu_ms` is processor time per check in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.ports.samples import RewardBatch
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits

FUNCTION = "rlboost.rewards.math:score"
REASONING = (
    "We write the sum as a product, collect what is alike and divide both sides by what is left. ",
    "Setting $x = {i}$ gives \\(f({i}) = {i}^2 - 1\\), which is more than the bound that we look for. ",
    "From the second equation, $a + b = {i}$, so that \\[ a^2 + 2ab + b^2 = {i}^2 \\] as in the first case. ",
    "Let us check that again: the other root is negative, so it is left out. ",
)
WARM = 1_000_000
LIMIT_S = 10
"""Longer than the function's own, so that no other work on the machine turns what is right into what is late."""


class Kind(NamedTuple):
    truth: Callable[[int], str]
    respelled: Callable[[int], str]


KINDS = {
    "integers": Kind(str, lambda n: f"{n}.0"),
    "fractions": Kind(lambda n: f"\\frac{{{n}}}{{{n + 1}}}", lambda n: f"\\dfrac{{{2 * n}}}{{{2 * n + 2}}}"),
    "roots": Kind(lambda n: f"{n}\\sqrt{{3}}", lambda n: f"\\sqrt{{3}} \\cdot {n}"),
    "polynomials": Kind(lambda n: f"x^2 + {n}x - {n + 2}", lambda n: f"x^2 - {n + 2} + {n}x"),
}


def group(kind: str, n: int, size: int, *, agree: bool) -> RewardBatch:
    """Return one problem with `size` completions, every second one right."""
    first = 1 + n * (size + 1)
    right, respelled = KINDS[kind]
    texts: list[str | list[dict[str, Any]]] = []
    for i in range(size):
        if i % 2:
            answer = respelled(first) if i % 8 == 1 else right(first)
        else:
            answer = right(first + 1 + (0 if agree and i % 4 else i))
        sentences = (REASONING[(i + k) % len(REASONING)].replace("{i}", str(i)) for k in range(6 + 2 * i))
        texts.append(f"Attempt {i}. {''.join(sentences)}The answer is \\boxed{{{answer}}}.<eos>")
    return RewardBatch(["?"] * size, texts, [[1]] * size, {"answer": [right(first)] * size})


def groups_of(kind: str, numbers: Sequence[int], size: int, *, agree: bool) -> list[RewardBatch]:
    names = list(KINDS) if kind == "mixed" else [kind]
    return [group(names[n % len(names)], n, size, agree=agree) for n in numbers]


def warming(n: int, size: int) -> list[RewardBatch]:
    return [batch for kind in KINDS for batch in groups_of(kind, range(WARM, WARM + n), size, agree=False)]


def check(scored: Sequence[Sequence[float | None] | None]) -> None:
    for rewards in scored:
        assert rewards is not None
        assert list(rewards) == [float(i % 2) for i in range(len(rewards))], rewards


def cpu_s(groups: Sequence[RewardBatch], size: int) -> float:
    """Return the processor time of the reward function for the groups."""
    from rlboost.rewards.math import score  # noqa: PLC0415 - in the measured process alone

    for batch in warming(4, size):
        score(batch.completions, limit_s=LIMIT_S, **batch.columns)
    began = time.process_time()
    scored = [score(batch.completions, limit_s=LIMIT_S, **batch.columns) for batch in groups]
    took_s = time.process_time() - began
    check(scored)
    return took_s


async def wall_s(groups: Sequence[RewardBatch], workers: int, size: int) -> float:
    """Return how long the groups take through the reward processes."""
    spec = RewardSpec(function=FUNCTION, arguments={"limit_s": LIMIT_S}, workers=workers, timeout_s=60)
    pool = RewardPool(spec, Waits())
    await pool.start()
    try:
        await asyncio.gather(*map(pool.score, warming(4 * workers, size)))
        began = time.perf_counter()
        scores = await asyncio.gather(*map(pool.score, groups))
        took_s = time.perf_counter() - began
        check([scored.rewards for scored in scores])
    finally:
        await pool.close()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=8)
    asked = parser.parse_args()
    size, numbers = asked.group_size, range(asked.groups)
    checks = asked.groups * size
    for kind in (*KINDS, "mixed"):
        for agree in (True, False):
            groups = groups_of(kind, numbers, size, agree=agree)
            took_s = asyncio.run(wall_s(groups, asked.workers, size))
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                cpu = own.submit(cpu_s, groups, size).result()
            row = {
                "answers": kind,
                "wrong": "some_agree" if agree else "all_differ",
                "workers": asked.workers,
                "checks_per_s": round(checks / took_s),
                "cpu_ms": round(cpu / checks * 1e3, 2),
                "load": round(os.getloadavg()[0], 1),
                "cores": os.cpu_count(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
