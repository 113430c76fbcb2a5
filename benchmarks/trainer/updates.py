"""The trainer's update path, and the loop that one would write without it, on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import Accumulate, TrainingRow, UpdatePlanner
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import floats, ints
from tests.support.losses import clipped_loss
from tests.support.training_rows import advantage_of

LOW, HIGH, RATE = 0.2, 0.28, 1e-5


def cut_by_length(groups: Sequence[Sequence[TrainingRow]], micro_batch_tokens: int) -> list[list[TrainingRow]]:
    """Return micro-batches to pad: rows x longest row <= `micro_batch_tokens`, each row >= half of the longest."""
    batches: list[list[TrainingRow]] = []
    for row in sorted((row for group in groups for row in group), key=lambda row: -row.n_tokens):
        longest = batches[-1][0].n_tokens if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= micro_batch_tokens and 2 * row.n_tokens >= longest:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def n_padded(batch: Sequence[TrainingRow]) -> int:
    """Return the number of tokens of a micro-batch, including padding."""
    return len(batch) * max(row.n_tokens for row in batch)


class Ours:
    """What a step of a job does from the moment on at which its samples are there and scored."""

    def __init__(
        self,
        model: Path,
        groups: list[list[TrainingRow]],
        micro_batch_tokens: int,
        device: str,
        dtype: str,
        *,
        compiled: bool = False,
    ) -> None:
        self._groups, self._budget = groups, micro_batch_tokens
        self._loss = clipped_loss(LOW, HIGH)
        spec = OptimizerSpec(lr=RATE)
        self._policy = TorchPolicy(PolicySettings(optimizer=spec, dtype=dtype, compile=compiled), device=device)
        self._policy.load_hf(model)

    def update(self) -> float:
        """Take one optimizer step; return the gradient's norm."""
        planner: UpdatePlanner[TrainingRow] = UpdatePlanner(len(self._groups), 1, self._budget)
        norm = 0.0
        for group in self._groups:
            for work in planner.add(group):
                if isinstance(work, Accumulate):
                    for batch in work.batches:
                        self._policy.accumulate([batch], self._loss)
                else:
                    norm = self._policy.step(RATE)
        return norm


class Bare:
    """transformers and AdamW, no metrics and no checks; lists of token ids in, padded, the same objective.

    It gives no attention mask, which would take sdpa's faster path from it.
    """

    def __init__(self, model: Path, batches: list[list[TrainingRow]], device: str, dtype: str) -> None:
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        self._batches = [
            [(ints(row.prompt), ints(row.completion), floats(row.sampled), advantage_of(row)) for row in rows]
            for rows in batches
        ]
        self._n_tokens = sum(len(tokens) for rows in self._batches for _, tokens, _, _ in rows)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self._device).eval()
        self.n_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def update(self) -> float:
        """Take one optimizer step; return the gradient's norm."""
        for rows in self._batches:
            width = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            old, weight = torch.zeros(len(rows), width - 1), torch.zeros(len(rows), width - 1)
            for i, (prompt, tokens, logprobs, advantage) in enumerate(rows):
                begin, end = len(prompt), len(prompt) + len(tokens)
                ids[i, :end] = torch.tensor([*prompt, *tokens])
                old[i, begin - 1 : end - 1] = torch.tensor(logprobs)
                weight[i, begin - 1 : end - 1] = advantage
            ids, old, weight = (tensor.to(self._device) for tensor in (ids, old, weight))
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16):
                logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (new - old).exp()
            objective = torch.min(ratio * weight, ratio.clamp(1 - LOW, 1 + HIGH) * weight)
            (-objective.sum() / self._n_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)
