"""A chat model so small that it learns in a few steps whether to call a tool, and which digit to answer.

One token is a whole tool call, as the chat template writes it. All other text is bytes. Before training, an answer is
a call or a digit, each about as likely.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.chat_tokenizers import byte_tokenizer
from tests.support.tool_model import ADD, TEMPLATE, call_text

CALL = call_text().replace("<tool_call>\n", "<tool_call>")
"""As the chat template writes it, so that a history with it is the same tokens."""
MAX_LEN = 1024
DIGITS = "0123"
_STEPS, _BATCH, _LR = 120, 8, 5e-3


def write_calling_model(
    directory: Path, call: str = CALL, prompts: Sequence[str] = ("3+4?", "1+2?"), tool: dict[str, Any] = ADD
) -> Path:
    """Write the model with its tokenizer; return the folder.

    Args:
        directory: a new folder.
        call: a tool call as `tests.support.tool_model.TEMPLATE` writes it, which becomes a token.
        prompts: that it has seen.
        tool: that it has seen.

    """
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens([AddedToken(call, normalized=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        _teach_form(model, tokenizer, [call, *DIGITS], prompts, tool)
    model.save_pretrained(directory)
    return directory


def _teach_form(
    model: Any, tokenizer: Any, answers: Sequence[str], prompts: Sequence[str], tool: dict[str, Any]
) -> None:
    """Train the model to answer any chat with a random one of the answers, and to end the turn after it."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _LR * (1 - step / _STEPS)
        rows = []
        for _ in range(_BATCH):
            messages = [{"role": "user", "content": draw.choice(prompts)}]
            if draw.random() < 0.5:
                messages.insert(0, {"role": "system", "content": draw.choice(("Answer.", "Use add."))})
            for _ in range(draw.randrange(3)):
                messages.append({"role": "assistant", "content": draw.choice(answers)})
                messages.append({"role": "tool", "content": draw.choice(DIGITS)})
            text = tokenizer.apply_chat_template(
                messages, tools=draw.choice(([tool], None)), tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            answer = tokenizer.encode(draw.choice(answers), add_special_tokens=False)
            rows.append((ids, [*answer, tokenizer.eos_token_id]))
        length = max(len(ids) + len(answer) for ids, answer in rows)
        inputs = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for i, (ids, answer) in enumerate(rows):
            inputs[i, : len(ids) + len(answer)] = torch.tensor([*ids, *answer])
            labels[i, len(ids) : len(ids) + len(answer)] = torch.tensor(answer)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
