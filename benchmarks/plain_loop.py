"""CPU seconds of the Countdown job in one plain process: what all the processes of `rlboost demo` are measured against.

    OMP_NUM_THREADS=1 python -m benchmarks.plain_loop [--steps 60] [--record .rlboost/demo/record.json]

The loop has no Redis, no manager, no weight store, no second process: one torch engine that holds a whole step's 256
samples at once, the job's reward function called in place, and the trainer's own torch engine. With `--record` it also
prints the ratio to a demo that ran: processor seconds for each thousand tokens generated, all of the demo's processes
over this one. Both include their imports, and neither the other's evaluation: the plain loop makes none.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.trainer.adapters.data import find_model, load_data
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.advantages import group_standardized
from rlboost.services.trainer.domain.loss.policy import job_loss
from rlboost.services.trainer.domain.plan import Accumulate, TrainingRow, UpdatePlanner, learning_rate, prompt_indices
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import Sampling
from rlboost.shared.wire import ints
from tests.support.jobs import parse_rl
from tests.support.staged_weights import Staged
from tests.support.training_rows import training_row

JOB = "examples/countdown/job.yaml"
POLL_S = 0.02


class PlainLoop:
    """The job in one process."""

    def __init__(self, spec: RlJob) -> None:
        self.spec = spec
        assert spec.reward is not None
        model = find_model(spec.model)
        self.data = load_data(spec, model)
        self.policy = TorchPolicy(
            PolicySettings(optimizer=spec.optimizer, temperature=spec.sampling.temperature), device="cpu"
        )
        self.policy.load_hf(model)
        self.engine = TorchEngine(model, slots=spec.data.prompts_per_step * spec.algorithm.group_size)
        module, _, name = spec.reward.parts[0].source.partition(":")
        self.score = getattr(importlib.import_module(module), name)
        self.loss = job_loss(spec)
        self.tokens = 0

    async def step(self, step: int) -> float:
        """Take one step; return its mean reward."""
        spec, n = self.spec, self.spec.algorithm.group_size
        await self.engine.load_weights(step, Staged(self._weights()))
        rows = prompt_indices(spec.trainer.seed, step, spec.data.prompts_per_step, len(self.data.train))
        samples = await self._generate(step, [row for row in rows for _ in range(n)])
        planner: UpdatePlanner[TrainingRow] = UpdatePlanner(
            len(rows), spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
        rewards: list[float] = []
        groups = [(row, samples[i * n : (i + 1) * n]) for i, row in enumerate(rows)]
        for row, group in sorted(groups, key=lambda item: max(len(tokens) for tokens, _ in item[1])):
            scored = self._score(row, [tokens for tokens, _ in group])
            rewards += scored
            prompt, values = ints(self.data.train[row].tokens), group_standardized(scored) or []
            trained = [
                training_row(prompt, tokens, logprobs, value)
                for (tokens, logprobs), value in zip(group, values, strict=False)
            ]
            for work in planner.add(trained):
                if isinstance(work, Accumulate):
                    self.policy.accumulate(work.batches, self.loss)
                else:
                    self.policy.step(learning_rate(spec.optimizer, step, spec.steps))
        return sum(rewards) / len(rewards)

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (shard.name, torch.frombuffer(bytearray(shard.data), dtype=torch.float32).view(shard.global_shape))
            for shard in self.policy.export_shards()
        ]

    def _score(self, row: int, completions: list[list[int]]) -> list[float]:
        prompt = self.data.train[row]
        columns: dict[str, list[Any]] = {key: [value] * len(completions) for key, value in prompt.columns.items()}
        texts = [self.data.decode(tokens, skip_special_tokens=False) for tokens in completions]
        scored: list[float] = self.score([""] * len(texts), texts, completions, completions_raw=texts, **columns)
        return scored

    async def _generate(self, step: int, rows: list[int]) -> list[tuple[list[int], list[float]]]:
        sampling = Sampling(
            temperature=self.spec.sampling.temperature,
            max_tokens=self.spec.sampling.max_tokens,
            stop_token_ids=self.data.stop_token_ids,
        )
        prompts = [ints(self.data.train[row].tokens) for row in rows]
        self.engine.submit([Request(i, 1, p, [], sampling, seed=step * 1000 + i) for i, p in enumerate(prompts)])
        made: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        left = len(rows)
        while left:
            await asyncio.sleep(POLL_S)
            for emission in self.engine.take_emissions():
                made[emission.sample][0].extend(emission.tokens)
                made[emission.sample][1].extend(emission.logprobs)
                left -= bool(emission.finish)
        self.tokens += sum(len(tokens) for tokens, _ in made.values())
        return [made[i] for i in range(len(rows))]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--record", type=Path, help="a demo's record, for the ratio")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = PlainLoop(parse_rl(load(JOB)))
    reward = 0.0
    for step in range(args.steps):
        reward = await loop.step(step)
    await loop.engine.close()
    cpu_s = time.process_time()
    row: dict[str, Any] = {
        "benchmark": "plain_loop",
        "steps": args.steps,
        "reward_of_last_step": round(reward, 3),
        "tokens": loop.tokens,
        "cpu_s": round(cpu_s, 1),
        "cpu_s_per_1k_tokens": round(1000 * cpu_s / loop.tokens, 4),
    }
    if args.record:
        demo = json.loads(args.record.read_text())
        demo_cpu_s, demo_tokens = sum(demo["cpu_s"].values()), demo["audit"]["tokens_generated"]
        row["demo_cpu_s"], row["demo_tokens"] = round(demo_cpu_s, 1), demo_tokens
        row["demo_over_plain"] = round(demo_cpu_s / demo_tokens / (cpu_s / loop.tokens), 2)
    print(json.dumps(row))


if __name__ == "__main__":
    asyncio.run(main())
