"""TRL's GRPOTrainer on a fleet of spot workers: GRPO on sums of two numbers, with a model of 0.2 M parameters.

rlboost init sums && rlboost up --trainers 0 --detach
python examples/trl/train.py sums --steps 40
torchrun --nproc-per-node 2 examples/trl/train.py sums --steps 40 --lora --job sums-lora
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from rlboost.fleet import Fleet
from rlboost.trl import rollout_func


def main() -> None:
    """Train, and print the reward of each step."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path, help="of rlboost init")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--state", type=Path, default=Path(".rlboost"), help="of rlboost up")
    arguments.add_argument("--job", default="sums-trl")
    arguments.add_argument("--lora", action="store_true", help="train an adapter")
    given = arguments.parse_args()
    system = json.loads((given.state / "config.json").read_text())
    sys.path.insert(0, str(given.folder))
    score = importlib.import_module("reward").score  # TRL's signature

    model = str(given.folder.resolve() / "model")
    with Fleet(system["url"], system["token"], job=given.job, model=model) as fleet:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            train_dataset=load_dataset("json", data_files=str(given.folder / "train.jsonl"), split="train"),
            rollout_func=rollout_func(fleet),  # the only difference from training without a fleet
            peft_config=LoraConfig(r=8, lora_alpha=64, target_modules="all-linear") if given.lora else None,
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                num_generations=8,
                per_device_train_batch_size=256,
                max_completion_length=8,
                learning_rate=1e-3,
                max_steps=given.steps,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
                beta=0.0,
                seed=1,
                bf16=False,  # autocast alone makes log-probabilities differ by 0.004 nats
                model_init_kwargs={"dtype": "float32"},
            ),
        )
        trainer.train()
        fleet.end()
    if trainer.accelerator.is_main_process:
        print("rewards:", *(round(row["reward"], 3) for row in trainer.state.log_history if "reward" in row))


if __name__ == "__main__":
    main()
