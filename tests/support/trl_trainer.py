"""A program as TRL's users write it, with a check of each completion's log-probabilities against the trainer's own.

    python -m tests.support.trl_trainer URL TOKEN FOLDER JOB STEPS OUTPUT BATCH [lora|fsdp2]

FOLDER is of `rlboost init sums`. OUTPUT has TRL's checkpoints, from which it continues. BATCH is the number of
completions of each process in a step. With `lora` an adapter is trained; with `fsdp2` the model is sharded, as
accelerate does on GPUs only, and no checkpoint is written. Each process says a line after each rollout.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl import GRPOConfig, GRPOTrainer

from rlboost.fleet import Fleet
from rlboost.trl import rollout_func
from tests.support import tiny_models
from tests.support.said import say

MAX_TOKENS = 32


def shard(trainer: Any) -> None:
    """Shard the trainer's model over its processes."""
    mesh = init_device_mesh("cpu", (trainer.accelerator.num_processes,))
    for layer in trainer.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    trainer.accelerator.prepare_model = lambda model, **_: model


def last_whole_checkpoint(output: str) -> str | None:
    """Return the newest checkpoint that has the file that is written last: a killed trainer may leave a part of one."""
    folders = [file.parent for file in Path(output).glob("checkpoint-*/trainer_state.json")]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


def main(url: str, token: str, folder: str, job: str, steps: str, output: str, batch: str, kind: str = "") -> None:
    """Train, and say what was sampled."""
    sys.path.insert(0, folder)
    model, rank = f"{folder}/model", int(os.environ.get("RANK", "0"))
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
            text = json.dumps(made["completion_ids"])
            say(
                rank=rank,
                step=trainer.state.global_step,
                gap=max(gaps),
                tokens=hashlib.sha256(text.encode()).hexdigest(),
                **({} if rank else {"job": fleet.job_id, "version": fleet.version}),
            )
            return made

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=importlib.import_module("reward").score,
            train_dataset=load_dataset("json", data_files=f"{folder}/train.jsonl", split="train"),
            rollout_func=checked,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if kind == "lora" else None,
            args=GRPOConfig(
                output_dir=output,
                num_generations=8,
                per_device_train_batch_size=int(batch),
                max_completion_length=MAX_TOKENS,
                learning_rate=1e-3,
                max_steps=int(steps),
                logging_steps=1,
                save_strategy="no" if kind == "fsdp2" else "steps",
                save_steps=1,
                max_grad_norm=0.0 if kind == "fsdp2" else 1.0,
                report_to=[],
                use_cpu=True,
                beta=0.0,
                seed=1,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
            ),
        )
        if kind == "fsdp2":
            shard(trainer)
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(output))
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        last = {"prompts": trainer._logs["prompt"], "scores": trainer._logs["rewards"]["score"]}
        say(
            rank=rank,
            rewards=rewards,
            advantages=[round(one, 4) for one in trainer._logs["advantages"]],
            **{name: list(values) for name, values in last.items()},
        )
        fleet.end()


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    main(*sys.argv[1:])
