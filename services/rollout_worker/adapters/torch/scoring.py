"""Scores given tokens with the torch engine's model: one causal forward pass without a KV cache."""

from __future__ import annotations

import torch
from torch.nn import functional

from rlboost.services.rollout_worker.adapters.torch.model import Model
from rlboost.services.rollout_worker.ports import Sequences


class _NoCache:
    """Replaces the slot cache: each token attends to those before it in the same pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """See `SlotCache.attend`."""
        del layer
        grouped = query.shape[1] != key.shape[1]
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return attended.transpose(1, 2)


def score(model: Model, sequences: Sequences, temperature: float) -> list[list[float]]:
    """Return each completion token's log-probability; see `ports.Engine.score`."""
    length = max(len(prompt) + len(completion) for prompt, completion in sequences)
    padded = [
        [*prompt, *completion] + [0] * (length - len(prompt) - len(completion)) for prompt, completion in sequences
    ]
    ids = torch.tensor(padded, device=model.device)
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, slot_cache=_NoCache()).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(2, ids[:, 1:, None])[..., 0].tolist()
    return [
        scores[len(prompt) - 1 : len(prompt) + len(completion) - 1]
        for scores, (prompt, completion) in zip(logprobs, sequences, strict=True)
    ]
