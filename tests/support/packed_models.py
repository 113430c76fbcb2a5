"""Small models for tests of packed rows, and the comparison of packed with padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
)

from rlboost.services.trainer.adapters.torch.attention import attention
from tests.support.tiny_models import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


CONVOLUTION = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])


def write(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def check_packed_attention(window: int, device: str, dtype: torch.dtype, head: int, tolerance: float | None) -> None:
    """Compare `attention` and its gradients with attention in float32 under a mask.

    Args:
        window: tokens that a token attends to.
        device: where it is computed.
        dtype: in which it is computed.
        head: the head size.
        tolerance: absolute; None for that of float32.

    """
    torch.manual_seed(0)
    boundaries = [0, 1, 8, 14, 27]  # the second and third row are computed by one call
    exact = [torch.randn(27, n, head).to(dtype).float().requires_grad_() for n in (4, 2, 2)]
    at = torch.arange(27)
    row = torch.bucketize(at, torch.tensor(boundaries[1:]), right=True)
    mask = (row[:, None] == row) & (at[:, None] >= at) & (at[:, None] - at < (window or 27))
    q, k, v = (part.transpose(0, 1) for part in exact)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    expected = expected.transpose(0, 1)
    ours = [part.detach().to(device, dtype).requires_grad_() for part in exact]
    ends = torch.tensor(boundaries, dtype=torch.int32, device=device)
    packed = attention(ours[0], ours[1], ours[2], ends, np.diff(boundaries).tolist(), None, window)
    upstream = torch.randn_like(expected).to(dtype)
    pairs = zip(
        (packed, *torch.autograd.grad(packed, ours, upstream.to(device))),
        (expected, *torch.autograd.grad(expected, exact, upstream.float())),
        strict=True,
    )
    for found, reference in pairs:
        torch.testing.assert_close(found.float().cpu(), reference, atol=tolerance, rtol=tolerance and 0)
