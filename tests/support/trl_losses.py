"""The loss of TRL's `GRPOTrainer` on tensors, without its model, data and processes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about newer releases of what it uses
    from trl import GRPOTrainer

MAX_TOKENS = 8


def trl_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Sequence[float],
    *,
    is_masked: Sequence[bool] = (),
    entropies: Sequence[Tensor] = (),
    **options: Any,
) -> Tensor:
    """Return the loss of one batch of completions.

    Args:
        logprobs: under the trained weights, one column per completion.
        old: under the old policy.
        advantages: one per completion.
        is_masked: whether `mask_truncated_completions` masks it.
        entropies: columns as those of `logprobs`.
        options: `loss_type`, and others under the names of `GRPOConfig`.

    """
    mask = _padded([torch.ones_like(column) for column in logprobs]).detach()
    if is_masked:
        mask = mask * (~torch.tensor(is_masked)).unsqueeze(1)
    columns = _padded(logprobs), _padded(entropies) if entropies else torch.zeros_like(mask), None
    coefficient = options.get("entropy_coef", 0.0)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: columns,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type=options["loss_type"],
        max_completion_length=MAX_TOKENS,
        use_vllm=False,
        use_adaptive_entropy=False,
        entropy_coef=coefficient,
        _entropy_bonus_enabled=bool(coefficient),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda value: value, reduce=lambda value, **_: value
        ),
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        **{f"{part}_ids": ids for part in ("prompt", "completion")},
        "prompt_mask": torch.ones_like(ids),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": _padded(old),
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def _padded(columns: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(columns), batch_first=True)
