"""TRL's `AsyncGRPOTrainer` as its users write it, on a gateway: `python -m tests.support.trl_async_trainer`.

Its arguments are URL, FOLDER (of `rlboost init sums`, which PYTHONPATH has), STEPS, and to train an adapter `lora`, or
`adapter` if TRL itself sends it. Three parts of TRL that need a GPU are replaced, and none sends requests: the check
that vLLM is installed, the attention kernel, and the name of the device.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import time
from typing import Any

import httpx
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

from rlboost.trl import WeightTransfer
from tests.support import tiny_models
from tests.support.said import say


class Attention:
    """Packed attention in plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any
    ) -> torch.Tensor:
        """Attend within each sequence."""
        del max_q, max_k
        found, repeat = [], q.shape[1] // k.shape[1]
        queries, keys = cu_q.tolist(), cu_k.tolist()
        for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
            key, value = (x[c:d].repeat_interleave(repeat, 1).transpose(0, 1)[None] for x in (k, v))
            query, scale = q[a:b].transpose(0, 1)[None], options["softmax_scale"]
            made = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
            found.append(made[0].transpose(0, 1))
        return torch.cat(found)


async_rollout_worker.is_vllm_available = lambda *_, **__: True
packing._flash_attn = lambda: Attention
async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12


def score(completions: list[Any], **given: Any) -> list[float]:
    """Return the folder's reward of conversations of one answer, in which TRL's reader leaves the question."""
    texts = [completion[-1]["content"].rpartition("=")[2] for completion in completions]
    found: list[float] = importlib.import_module("reward").score(completions=texts, **given)
    return found


def main(url: str, folder: str, steps: str, lora: str = "") -> None:
    """Train, and say what TRL has logged."""
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    # TRL needs a chat template, and how to read an answer of the model.
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    content = {"close_pattern": r"<eos>|$", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<bos>",
        "fields": {"content": content},
    }
    rows = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train")
    trainer = AsyncGRPOTrainer(
        model=f"{folder}/model",
        processing_class=tokenizer,
        reward_funcs=score,
        train_dataset=rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        weight_transfer=None if lora == "adapter" else WeightTransfer(url),
        peft_config=LoraConfig(r=8, lora_alpha=64, target_modules="all-linear") if lora else None,
        args=AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            vllm_server_base_url=url,
            num_generations=8,
            max_completion_length=8,
            max_inflight_tasks=64,
            max_staleness=2,
            weight_sync_steps=1,
            max_steps=int(steps),
            learning_rate=1e-3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            dtype="float32",
            gradient_checkpointing=False,
            token_budget=2048,
        ),
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    say(logged=logged, gap=gap(url, trainer))


def gap(url: str, trainer: Any) -> float:
    """Return how much log-probabilities of samples of the last version differ from the trained model's, in nats."""
    prompt = trainer.processing_class("12+34=")["input_ids"]
    sampling = {"n": 16, "max_tokens": 8, "logprobs": 0}
    newest = httpx.get(f"{url}/weight_info").json()["weight_version"]
    found, limit = list[dict[str, Any]](), time.monotonic() + 60
    while not found:  # the workers switch one by one
        assert time.monotonic() < limit
        body = {"token_ids": prompt, "sampling_params": sampling}
        made = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60).json()["choices"]
        found = [one for one in made if {span["version"] for span in one["weight_versions"]} == {newest}]
    trained = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    trained = trained.merge_and_unload() if hasattr(trained, "peft_config") else trained
    model = AutoModelForCausalLM.from_pretrained(trained.name_or_path, dtype="float32")  # with its own attention
    model.load_state_dict(trained.state_dict())
    with torch.no_grad():
        gaps = [
            abs(own - given["logprob"])
            for one in found
            for own, given in zip(
                tiny_models.logprobs(model, prompt, one["token_ids"]), one["logprobs"]["content"], strict=True
            )
        ]
    return float(max(gaps))


if __name__ == "__main__":
    main(*sys.argv[1:])
