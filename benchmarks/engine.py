"""Tokens per second of the torch engine, and its ratio to a plain Hugging Face loop on the same model in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.engine [--batch 1 16 64 128] [--model DIR] [--device cuda --dtype bfloat16]

One JSON line per (workload, batch). `uniform`: one batch of samples of the same length. `mixed`: four batches' worth of
samples whose lengths have a long tail; the plain loop runs them batch by batch, each to its longest sample, and only
tokens that were asked for count. Both sides draw at temperature 1 and report each token's log-probability.

Each figure is the best of `--repeats`, the two sides taking turns. On a CPU a second is one of this process's own
processor time, so that neighbours on the machine disturb little; with several threads it is not one on the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from services.rollout_worker.adapters.torch_engine import DTYPES, TorchEngine
from services.rollout_worker.ports import Request
from shared.messages import Sampling

PROMPT = list(range(1, 9))
FLUSH_INTERVAL_S = 0.05
DEMO = Qwen3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
"""The model of examples/countdown."""


def lengths_of(workload: str, batch: int, longest: int) -> list[int]:
    if workload == "uniform":
        return [longest] * batch
    rng = random.Random(0)
    return [min(longest, max(4, int(longest / 4 * rng.lognormvariate(0, 0.8)))) for _ in range(4 * batch)]


async def run_engine(engine: TorchEngine, lengths: list[int]) -> None:
    """Return when every sample has ended."""
    engine.submit([Request(i, 1, PROMPT, [], Sampling(max_tokens=n), seed=i) for i, n in enumerate(lengths)])
    left = len(lengths)
    while left:
        await asyncio.sleep(min(FLUSH_INTERVAL_S, 0.001 * max(lengths)))
        left -= sum(emission.finish != 0 for emission in engine.drain())


@torch.inference_mode()
def run_plain(model: Any, lengths: list[int], batch: int) -> None:
    """Make the samples with the model's own forward pass and cache, batch by batch."""
    for first in range(0, len(lengths), batch):
        rows = lengths[first : first + batch]
        ids = torch.tensor([PROMPT] * len(rows), device=model.device)
        cache, made = None, []
        for _ in range(max(rows)):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float(), -1)
            ids = torch.multinomial(logprobs.exp(), 1)
            made.append((ids, logprobs.gather(1, ids)))
        for part in zip(*made, strict=True):
            torch.cat(part, 1).tolist()


def best_of(repeats: int, clock: Callable[[], float], *runs: Callable[[], None]) -> list[float]:
    """Return the fewest seconds of each of `runs`, which take turns."""
    best = [math.inf] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            began = clock()
            run()
            best[i] = min(best[i], clock() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--tokens", type=int, default=256, help="of the longest sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a directory with config.json; the demo's model by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    args = parser.parse_args()

    config = AutoConfig.from_pretrained(args.model) if args.model else DEMO
    plain = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation="sdpa")
    plain = plain.eval().to(args.device)
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        config.save_pretrained(directory)
        for batch in args.batch:
            engine = TorchEngine(Path(directory), slots=batch, device=args.device, dtype=args.dtype)
            runner.run(engine.load_weights(0, plain.state_dict().items()))
            for workload in ("uniform", "mixed"):
                lengths = lengths_of(workload, batch, args.tokens)
                ours_s, plain_s = best_of(
                    args.repeats,
                    time.process_time if args.device == "cpu" else time.perf_counter,
                    lambda: runner.run(run_engine(engine, lengths)),  # noqa: B023 - called within the iteration
                    lambda: run_plain(plain, lengths, batch),  # noqa: B023 - likewise
                )
                row = {
                    "workload": workload,
                    "batch": batch,
                    "tokens_per_s": round(sum(lengths) / ours_s),
                    "plain_tokens_per_s": round(sum(lengths) / plain_s),
                    "ratio": round(plain_s / ours_s, 2),
                    "threads": torch.get_num_threads(),
                    "device": args.device,
                    "dtype": args.dtype,
                }
                print(json.dumps(row), flush=True)
            runner.run(engine.close())


if __name__ == "__main__":
    main()
