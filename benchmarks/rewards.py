"""How many answers a second math-verify checks through the reward processes, and what a check costs.

    OMP_NUM_THREADS=1 python -m benchmarks.rewards [--workers 2] [--groups 100] [--group-size 8]

The whole path of a job: `rlboost.rewards.math:score` in as many processes as `reward.workers` says, one group at a time
in each. A group has one problem; half of its completions are right, a quarter of these in another spelling. `wrong`:
`some_agree`, as in groups that are sampled, where half of the wrong ones give one answer; or `all_differ`. Each
completion has its own reasoning of 100 to 300 words with formulas before the answer. No answer occurs in two groups.

`cold` is the first time that an answer is seen, `again` a second epoch with other texts around the same answers. The
processes are warm: the parser's first expressions of each kind take it many times longer. `cpu_ms` is processor time a
check in one process, beside `plain`: the library alone at the same time, which reads and compares each completion (what
is right once a group). That ratio says more than a rate where other work shares the cores.
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
from typing import NamedTuple

from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.ports import RewardBatch
from shared.reward import RewardSpec
from shared.waiting import Waits

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


def group(kind: str, n: int, size: int, *, agree: bool, epoch: int = 0) -> RewardBatch:
    """Return one problem with `size` completions, every second one right."""
    first = 1 + n * (size + 1)
    right, respelled = KINDS[kind]
    texts = []
    for i in range(size):
        if i % 2:
            answer = respelled(first) if i % 8 == 1 else right(first)
        else:
            answer = right(first + 1 + (0 if agree and i % 4 else i))
        sentences = (REASONING[(i + k + epoch) % len(REASONING)].replace("{i}", str(i)) for k in range(6 + 2 * i))
        texts.append(f"Attempt {i}.{epoch}. {''.join(sentences)}The answer is \\boxed{{{answer}}}.<eos>")
    return RewardBatch(["?"] * size, texts, [[1]] * size, {"answer": [right(first)] * size})


def groups_of(kind: str, numbers: Sequence[int], size: int, *, agree: bool, epoch: int = 0) -> list[RewardBatch]:
    names = list(KINDS) if kind == "mixed" else [kind]
    return [group(names[n % len(names)], n, size, agree=agree, epoch=epoch) for n in numbers]


def warming(n: int, size: int) -> list[RewardBatch]:
    return [batch for kind in KINDS for batch in groups_of(kind, range(WARM, WARM + n), size, agree=False)]


def check(scored: Sequence[Sequence[float | None] | None]) -> None:
    for rewards in scored:
        assert rewards is not None
        assert list(rewards) == [float(i % 2) for i in range(len(rewards))], rewards


def plain_cpu_s(groups: Sequence[RewardBatch], size: int) -> float:
    """Return the processor time of the library alone, in a process where nothing of it was changed."""
    from math_verify import parse, verify  # noqa: PLC0415 - not where ours is measured

    def score(batch: RewardBatch) -> list[float]:
        gold = parse(f"\\boxed{{{batch.columns['answer'][0]}}}", parsing_timeout=LIMIT_S)
        answers = (parse(str(text), parsing_timeout=LIMIT_S) for text in batch.completions)
        return [float(verify(gold, answer, timeout_seconds=LIMIT_S)) for answer in answers]

    for batch in warming(4, size):
        score(batch)
    began = time.process_time()
    scored = [score(batch) for batch in groups]
    took_s = time.process_time() - began
    check(scored)
    return took_s


def our_cpu_s(epochs: Sequence[Sequence[RewardBatch]], size: int) -> list[float]:
    """Return the processor time of our function for each epoch."""
    from rlboost.rewards.math import score  # noqa: PLC0415 - it changes the library in its process

    for batch in warming(4, size):
        score(batch.completions, limit_s=LIMIT_S, **batch.columns)
    took_s = []
    for groups in epochs:
        began = time.process_time()
        scored = [score(batch.completions, limit_s=LIMIT_S, **batch.columns) for batch in groups]
        took_s.append(time.process_time() - began)
        check(scored)
    return took_s


async def wall_s(epochs: Sequence[Sequence[RewardBatch]], workers: int, size: int) -> list[float]:
    """Return how long each epoch took through the reward processes; an answer may meet another process again."""
    spec = RewardSpec(function=FUNCTION, arguments={"limit_s": LIMIT_S}, workers=workers, timeout_s=60)
    pool = RewardPool(spec, Waits())
    await pool.start()
    took_s = []
    try:
        await asyncio.gather(*map(pool.score, warming(4 * workers, size)))
        for groups in epochs:
            began = time.perf_counter()
            scores = await asyncio.gather(*map(pool.score, groups))
            took_s.append(time.perf_counter() - began)
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
            epochs = [groups_of(kind, numbers, size, agree=agree, epoch=epoch) for epoch in range(2)]
            cold_s, again_s = asyncio.run(wall_s(epochs, asked.workers, size))
            # At once, so that other work disturbs both alike.
            with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as own:
                running = own.submit(plain_cpu_s, epochs[0], size), own.submit(our_cpu_s, epochs, size)
                plain, (cold, again) = running[0].result(), running[1].result()
            row = {
                "answers": kind,
                "wrong": "some_agree" if agree else "all_differ",
                "workers": asked.workers,
                "checks_per_s": {"cold": round(checks / cold_s), "again": round(checks / again_s)},
                "cpu_ms": {
                    name: round(took / checks * 1e3, 2)
                    for name, took in (("plain", plain), ("cold", cold), ("again", again))
                },
                "load": round(os.getloadavg()[0], 1),
                "cores": os.cpu_count(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
