"""A program as TRL's users write it, with a check of each completion's log-probabilities against the trainer's own.

    python -m tests.support.trl_trainer URL TOKEN FOLDER JOB STEPS OUTPUT

FOLDER is of `rlboost init sums`. OUTPUT has TRL's checkpoints, from which it continues. It prints a line of JSON after
each rollout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from rlboost.fleet import Fleet
from rlboost.trl import rollout_func
from tests.support import tiny_models

MAX_TOKENS = 32


def main(url: str, token: str, folder: str, job: str, steps: str, output: str) -> None:
    """Train, and say what was sampled."""
    sys.path.insert(0, folder)
    model = f"{folder}/model"
    with Fleet(url, token, job=job, model=model, replace=True, trainer="trl") as fleet:
        sample = rollout_func(fleet)

        def checked(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            made = sample(prompts, trainer)
            with torch.no_grad():
                gaps = [
                    max(
                        abs(a - b)
                        for a, b in zip(tiny_models.logprobs(trainer.model, prompt, tokens), given, strict=True)
                    )
                    for prompt, tokens, given in zip(*made.values(), strict=True)
                ]
            report = {
                "job": fleet.job_id,
                "version": fleet.version,
                "step": trainer.state.global_step,
                "gap": max(gaps),
            }
            print(json.dumps({**report, "tokens": made["completion_ids"]}), flush=True)
            return made

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=importlib.import_module("reward").score,
            train_dataset=load_dataset("json", data_files=f"{folder}/train.jsonl", split="train"),
            rollout_func=checked,
            args=GRPOConfig(
                output_dir=output,
                num_generations=8,
                per_device_train_batch_size=256,
                max_completion_length=MAX_TOKENS,
                learning_rate=1e-3,
                max_steps=int(steps),
                logging_steps=1,
                save_steps=1,
                report_to=[],
                use_cpu=True,
                beta=0.0,
                seed=1,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
            ),
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if Path(output).exists() else None)
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        print(json.dumps({"rewards": rewards}), flush=True)
        fleet.end()


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    main(*sys.argv[1:])
