"""The Countdown job by TRL's GRPOTrainer in this process; prints as JSON wall and processor seconds a step.

Needs TRL: pip install -c constraints.txt -e '.[dev]'
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlboost.examples.countdown.reward import score
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import RlJob
from tests.support.jobs import parse_rl

JOB = "examples/countdown/job.yaml"


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Notes the time after each optimizer step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.mark()


def settings(spec: RlJob, steps: int, folder: Path) -> Any:
    """Return the job's choices in TRL's words; what it has no word for stays TRL's default."""
    n, updates = spec.data.prompts_per_step * spec.algorithm.group_size, spec.algorithm.updates_per_step
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=n // updates,
        steps_per_generation=updates,
        max_steps=steps * updates,
        num_generations=spec.algorithm.group_size,
        max_completion_length=spec.sampling.max_tokens,
        temperature=spec.sampling.temperature,
        beta=spec.algorithm.kl_coef,
        epsilon=spec.algorithm.clip_low,
        epsilon_high=spec.algorithm.clip_high,
        learning_rate=spec.optimizer.lr,
        adam_beta1=spec.optimizer.betas[0],
        adam_beta2=spec.optimizer.betas[1],
        weight_decay=spec.optimizer.weight_decay,
        max_grad_norm=spec.optimizer.grad_clip,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        logging_steps=10_000,
        disable_tqdm=True,
        seed=spec.trainer.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, required=True, help="for what TRL writes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = parse_rl(load(JOB))
    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left")

    clock, tokens = Clock(), 0

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        raw = [tokenizer.decode(ids) for ids in completion_ids]
        return score(completion_ids=completion_ids, completions_raw=raw, **columns)

    trainer = GRPOTrainer(
        model=spec.model,
        reward_funcs=reward,
        args=settings(spec, args.steps, args.folder),
        train_dataset=load_dataset("json", data_files=spec.data.train, split="train"),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    marks = clock.marks[:: spec.algorithm.updates_per_step]
    steps = [[wall - w, cpu - c] for (w, c), (wall, cpu) in pairwise(marks)]
    print(json.dumps({"steps": steps, "tokens": tokens}))


if __name__ == "__main__":
    main()
