"""Drafts from the samples of the same prompt in the torch engine: the same samples, tokens per pass, time of the tail.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation [--model examples/countdown/base] [--rounds 5]

Groups of eight samples of examples/countdown, sampled at temperature 1 by its model (after the warm-up, before RL), or
by the `model` folder of a finished demo. Three tables:

1. Samples and tokens that differ. "drafts": whole groups with drafts as long as possible, against the same without.
   "other batch": without drafts, one group at a time instead of all at once. Both change how many rows a kernel gets.
2. Drafted tokens and tokens per forward pass of the longest sample of each group, alone in the engine, with some of its
   siblings known. Drafts are as long as possible up to a limit, so that this does not depend on the machine.
3. The tail: the longest samples of n groups at once, without drafts and with. Both engines take turns; a figure is the
   median of the rounds' ratios of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rlboost.services.rollout_worker.adapters.torch.engine import DTYPES, TorchEngine
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.speculation import Drafter, PassTimes
from rlboost.shared.messages import Sampling
from tests.support.engines import Collected, Collector, FreePasses
from tests.support.staged_weights import Staged

EXAMPLE = Path(__file__).parent.parent / "examples" / "countdown"
SIBLINGS = 8
SLOTS = 128
Dtype = Literal["float32", "bfloat16"]
Samples = dict[int, Collected]


class Groups:
    """The requests of some groups."""

    def __init__(self, model: Path, n: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        rows = [json.loads(line) for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()[:n]]
        self._prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        self._sampling = Sampling(max_tokens=256, stop_token_ids=(tokenizer.eos_token_id,))
        self.groups = [self._group(number) for number in range(n)]
        self.all = [request for group in self.groups for request in group]

    def _group(self, number: int) -> list[Request]:
        first = number * SIBLINGS
        samples = range(first, first + SIBLINGS)
        return [Request(sample, 1, self._prompts[number], [], self._sampling, 1000 + sample) for sample in samples]

    def longest(self, samples: Samples) -> list[Request]:
        """Return the longest sample of each group."""
        return [max(group, key=lambda request: len(samples[request.sample].tokens)) for group in self.groups]

    def siblings(self, request: Request, samples: Samples) -> list[list[int]]:
        """Return the completions of a sample's siblings."""
        group = self.groups[request.sample // SIBLINGS]
        return [samples[one.sample].tokens for one in group if one is not request]


async def start(model: Path, dtype: Dtype, drafter: Drafter | None = None) -> TorchEngine:
    """Return an engine that has loaded a model."""
    engine = TorchEngine(model, slots=SLOTS, dtype=dtype, drafter=drafter)
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(model / "model.safetensors").items()}
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings")
    await engine.load_weights(0, Staged((n, t) for n, t in tensors.items() if not (tied and n == "lm_head.weight")))
    return engine


async def generate(engine: TorchEngine, requests: Sequence[Request]) -> Samples:
    """Return what an engine makes of requests."""
    collector = Collector(engine)
    engine.submit(requests)
    left = {request.key for request in requests}
    while left:
        await asyncio.sleep(0.002)
        collector.take_emissions()
        left = {key for key in left if key not in collector.of or not collector.of[key].ended}
    return {request.sample: collector.of[request.key] for request in requests}


async def differences(model: Path, groups: Groups, dtype: Dtype) -> Samples:
    """Print the first table's lines of a dtype; return the samples without drafts."""
    plain, drafting = await start(model, dtype), await start(model, dtype, Drafter(8 * SLOTS, FreePasses()))
    expected = await generate(plain, groups.all)
    others: Samples = {}
    for group in groups.groups:
        others |= await generate(plain, group)
    for name, got in (("drafts", await generate(drafting, groups.all)), ("other batch", others)):
        same = [sample for sample, one in expected.items() if one.tokens == got[sample].tokens]
        pairs = [pair for s in same for pair in zip(expected[s].logprobs, got[s].logprobs, strict=True)]
        n_tokens = sum(len(one.tokens) for one in expected.values())
        worst = max(abs(one - other) for one, other in pairs)
        share = sum(one != other for one, other in pairs) / len(pairs)
        counts = f"{len(expected)} | {n_tokens} | {len(expected) - len(same)}"
        print(f"| {dtype} | {name} | {counts} | {share:.2f} | {worst:.1e} |")
    await plain.close()
    await drafting.close()
    return expected


async def drafts_per_pass(
    model: Path, groups: Groups, samples: Samples, known: int, longest: int
) -> tuple[float, float]:
    """Return drafted tokens and tokens per pass, with this many siblings known and drafts of up to `longest` tokens."""
    drafter = Drafter(1 + longest, FreePasses())
    engine = await start(model, "float32", drafter)
    n_tokens = 0
    for request in groups.longest(samples):
        for completion in groups.siblings(request, samples)[:known]:
            drafter.hint(request.prompt, completion)
        made = await generate(engine, [request])
        assert made[request.sample].tokens == samples[request.sample].tokens
        n_tokens += len(made[request.sample].tokens)
    await engine.close()
    passes = n_tokens - drafter.accepted_total
    return drafter.drafted_total / passes, n_tokens / passes


async def tail(model: Path, groups: Groups, samples: Samples, n: int, known: int, rounds: int) -> str:
    """Return a line of the third table."""
    longest, times = groups.longest(samples), PassTimes()
    ratios: list[float] = []
    n_tokens = n_accepted = 0
    for round_ in range(rounds + 1):
        # New ones, which know nothing of earlier rounds but how long passes take.
        drafter = Drafter(SLOTS, times)
        engines = await start(model, "float32"), await start(model, "float32", drafter)
        chosen = [longest[(round_ * n + i) % len(longest)] for i in range(n)]
        for request in chosen:
            for completion in groups.siblings(request, samples)[:known]:
                drafter.hint(request.prompt, completion)
        seconds = []
        for engine in engines:
            began = time.process_time()
            made = await generate(engine, chosen)
            seconds.append(time.process_time() - began)
            assert all(made[r.sample].tokens == samples[r.sample].tokens for r in chosen)
            await engine.close()
        if round_:  # the first warms up
            ratios.append(seconds[1] / seconds[0])
            n_tokens += sum(len(made[r.sample].tokens) for r in chosen)
            n_accepted += drafter.accepted_total
    return f"| {n} | {known} | {n_tokens / (n_tokens - n_accepted):.2f} | {median(ratios):.2f} |"


async def measure(args: argparse.Namespace) -> None:
    groups = Groups(args.model, args.groups)
    print("| dtype | against | samples | tokens | samples that differ | logprobs that differ | by at most |")
    print("|---|---|---|---|---|---|---|")
    samples = await differences(args.model, groups, "float32")
    await differences(args.model, groups, "bfloat16")
    print("\n| siblings known | longest draft | drafted per pass | tokens per pass |\n|---|---|---|---|")
    for known in (0, 1, 3, 7):
        for longest in (4, 8):
            drafted, tokens = await drafts_per_pass(args.model, groups, samples, known, longest)
            print(f"| {known} | {longest} | {drafted:.2f} | {tokens:.2f} |", flush=True)
    print("\n| batch | siblings known | tokens per pass | time with drafts : without |\n|---|---|---|---|")
    for n in args.batches:
        for known in (0, 7):
            print(await tail(args.model, groups, samples, n, known, args.rounds), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "base")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
