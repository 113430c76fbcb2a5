"""A program as Tinker's users write it, with Tinker's client: supervised steps, then steps of importance sampling.

The first imitate right sums; the reward of the others is 1 for a completion that begins with the digit 1.

    python -m tests.support.tinker_loops URL FOLDER SFT_STEPS RL_STEPS

FOLDER is of `rlboost init sums`. It prints a line of JSON after each step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types

PROMPTS, GROUP, MAX_TOKENS = 32, 8, 8
RATE = 2e-3


def say(**line: Any) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())


def datum(prompt: list[int], tokens: list[int], **columns: list[float]) -> types.Datum:
    """Return a sequence, shifted by one: the tokens after the prompt have the columns, the prompt has zeros."""
    before = len(prompt) - 1
    inputs: dict[str, Any] = {key: [0.0] * before + values for key, values in columns.items()}
    inputs["target_tokens"] = prompt[1:] + tokens
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + tokens[:-1]), loss_fn_inputs=inputs)


def main(url: str, folder: str, sft_steps: str, rl_steps: str) -> None:
    rows = [json.loads(line) for line in Path(folder, "train.jsonl").read_text().splitlines()]
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client(base_model=f"{folder}/model", rank=16, seed=0).result()
    tokenizer = client.get_tokenizer()
    adam = types.AdamParams(learning_rate=RATE)
    for step in range(int(sft_steps)):
        batch = []
        for row in rows[:128]:
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            answer = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
            batch.append(datum(prompt, answer, weights=[1.0] * len(answer)))
        forward = client.forward_backward(batch, "cross_entropy")
        client.optim_step(adam).result()
        say(kind="sft", step=step, loss=forward.result().metrics["loss:sum"] / 128)
    for step in range(int(rl_steps)):
        sampling = client.save_weights_and_get_sampling_client().result()
        asked = rows[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in asked]
        params = types.SamplingParams(max_tokens=MAX_TOKENS)
        futures = [sampling.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        batch, rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
            own = [float(text.strip().startswith("1")) for text in texts]
            rewards += own
            for one, reward in zip(sequences, own, strict=True):
                n = len(one.tokens)
                advantages = [reward - sum(own) / GROUP] * n
                batch.append(datum(prompt, list(one.tokens), logprobs=list(one.logprobs), advantages=advantages))
        forward = client.forward_backward(batch, "importance_sampling")
        update = client.optim_step(adam)
        outputs = forward.result().loss_fn_outputs
        update.result()
        gaps = [
            abs(a - b)
            for one, out in zip(batch, outputs, strict=True)
            for a, b in zip(one.loss_fn_inputs["logprobs"].tolist(), out["logprobs"].tolist(), strict=True)
            if a
        ]
        say(kind="rl", step=step, reward=sum(rewards) / len(rewards), gap=max(gaps))
    service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
