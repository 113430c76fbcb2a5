"""The Countdown job by transformers and torch alone; prints as JSON wall and processor seconds per step.

It is the loop that one writes without a library for RL: `model.generate` for all 256 samples of a step as one batch,
log-probabilities from a forward pass, the clipped GRPO objective, AdamW. Only the reward function, the prompts and the
job file's numbers are ours. Rows are sorted by length before they are cut into micro-batches, which saves padding.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlboost.examples.countdown.reward import score

JOB = Path("examples/countdown/job.yaml")
ROWS = 32
"""Of a micro-batch."""


class PlainJob:
    """GRPO, two updates per step as in the job file."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
        numbers = job["optimizer"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=numbers["lr"], betas=numbers["betas"], weight_decay=numbers["weight_decay"]
        )
        self.data = [json.loads(line) for line in Path(job["data"]["train"]).read_text().splitlines()]
        Random(0).shuffle(self.data)
        self.tokens = 0

    def step(self, step: int) -> float:
        """Take one step; return its mean reward."""
        algorithm, n = self.job["algorithm"], self.job["algorithm"]["group_size"]
        per_step = self.job["data"]["prompts_per_step"]
        rows = [self.data[(step * per_step + i) % len(self.data)] for i in range(per_step) for _ in range(n)]
        prompts = self.tokenizer([row["prompt"] for row in rows], return_tensors="pt")
        width = prompts["input_ids"].shape[1]
        with torch.inference_mode():
            ids = self.model.generate(
                **prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=self.job["sampling"]["max_tokens"]
            ).clone()
        ended = (ids[:, width:] == self.tokenizer.eos_token_id).int()
        mask = (ended.cumsum(1) - ended == 0).float()  # up to and including the end token
        completions = [
            self.tokenizer.decode(tokens[: int(length)])
            for tokens, length in zip(ids[:, width:], mask.sum(1), strict=True)
        ]
        rewards = torch.tensor(
            score(
                [row["prompt"] for row in rows],
                completions,
                [[]] * len(rows),
                completions_raw=completions,
                numbers=[row["numbers"] for row in rows],
                target=[row["target"] for row in rows],
            )
        )
        groups = rewards.view(-1, n)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        self.tokens += int(mask.sum())
        size = len(rows) // algorithm["updates_per_step"]
        updates = [order[mask[order].sum(1).argsort()].split(ROWS) for order in torch.arange(len(rows)).split(size)]
        with torch.no_grad():
            old = [[self._logprobs(ids, mask, width, batch)[0] for batch in update] for update in updates]
        for update, before in zip(updates, old, strict=True):
            self._update(ids, mask, width, advantages, update, before)
        return float(rewards.mean())

    def _update(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        width: int,
        advantages: torch.Tensor,
        update: tuple[torch.Tensor, ...],
        old: list[torch.Tensor],
    ) -> None:
        low, high = self.job["algorithm"]["clip_low"], self.job["algorithm"]["clip_high"]
        n_tokens = mask[torch.cat(update)].sum()
        for batch, before in zip(update, old, strict=True):
            new, of = self._logprobs(ids, mask, width, batch)
            ratio, advantage = (new - before).exp(), advantages[batch, None]
            objective = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            (-(objective * of).sum() / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job["optimizer"]["grad_clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _logprobs(
        self, ids: torch.Tensor, mask: torch.Tensor, width: int, batch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and mask of the completions of some rows, cut to the longest of them."""
        of = mask[batch]
        end = int(of.sum(1).max())
        given = ids[batch, : width + end]
        logits = self.model(input_ids=given, use_cache=False).logits[:, width - 1 : -1]
        return logits.log_softmax(-1).gather(-1, given[:, width:, None])[..., 0], of[:, :end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = PlainJob(yaml.safe_load(JOB.read_text()))
    steps, rewards = [], []
    for step in range(args.steps):
        wall, cpu = time.perf_counter(), time.process_time()
        rewards.append(round(job.step(step), 3))
        steps.append([time.perf_counter() - wall, time.process_time() - cpu])
    print(json.dumps({"steps": steps, "tokens": job.tokens, "rewards": rewards}))


if __name__ == "__main__":
    main()
